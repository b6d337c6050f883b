"""Does every shipped config reach what its header promises, over seeds?

    python benchmarks/shipped.py [--seeds 3] [--jobs 1] [NAME ...]

Each run is a process of its own with one thread; with --jobs 1 its wall time is that of a core that
nothing else of this benchmark uses.
"""

import argparse
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from measure import ROOT, run_json, save, table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of configs (default: all)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 1 to this (default: 3)")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (default: 1)")
    arguments = parser.parse_args()
    names = arguments.names or sorted(path.stem for path in (ROOT / "configs").glob("*.toml"))
    runs = [(name, seed) for name in names for seed in range(1, arguments.seeds + 1)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        results = list(pool.map(lambda run: once(*run, Path(folder)), runs))
    rows = []
    for name in names:
        mine = [r for r in results if r["config"] == name]
        reached = sum(r["reached"] for r in mine)
        rows.append((
            name, f"{reached} of {len(mine)}",
            *(" ".join(f"{r[key]:,.{digits}f}" for r in mine)
              for key, digits in (("return_mean", 1), ("steps", 0), ("total_s", 1))),
        ))  # fmt: skip
    print(table(("config", "reached", "return", "steps", "wall s"), rows))
    print(save("shipped", {"runs": results, "jobs": arguments.jobs}))
    if not all(r["reached"] for r in results):
        sys.exit("a shipped config missed what its header promises")


def once(name: str, seed: int, folder: Path) -> dict[str, object]:
    """One run; it has reached its target where the return ended it, not the ceiling of steps."""
    argv = [
        sys.executable, "-m", "tianji", "train", f"configs/{name}.toml", f"seed={seed}",
        "--json", "--plain", "--runs", str(folder),
    ]  # fmt: skip
    result = run_json(argv, {"OMP_NUM_THREADS": "1"}, timeout=3600)
    mean = np.nan if result["return_mean"] is None else result["return_mean"]
    kept = {key: result[key] for key in ("steps", "updates", "total_s", "stop_reason")}
    reached = result["stop_reason"].startswith("return")
    print(f"{name} seed {seed}: {result['stop_reason']}, {result['total_s']:.1f} s", flush=True)
    return {"config": name, "seed": seed, "reached": reached, "return_mean": mean, **kept}


if __name__ == "__main__":
    main()
