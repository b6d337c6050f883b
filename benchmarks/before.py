"""This tree against another revision of it: how quick runs are, and whether they learn the same.

    python benchmarks/before.py REV [--rounds 7] [--seconds 4] [--only TEXT]
    python benchmarks/before.py REV --hashes [--only TEXT]

REV is checked out into a temporary folder, and each tree runs its own code, configs and peers in
processes of its own, all in turn. Steps per second: of CartPole with engine serial, and with engine
local and 2 actors, of which the seconds from launch to the first step are, too; of an actor of Pong
alone. Where others use the machine, those per second of the processor ("CPU s") are the surest. MB
(10^6 bytes) per second of the transport, from one process to another, and what a message takes of
both processors. A ratio is this tree's figure over REV's: of seconds, less is better.

With --hashes, nothing is timed: every shipped config that both trees have is run for a few updates
with engine serial, and the hashes of what was learnt are compared.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import contextlib
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from measure import (
    BARE,
    ROOT,
    interleaved,
    medians,
    quartiles,
    ratio_of_medians,
    run_json,
    run_process,
    save,
    table,
)

UPDATES = 4
"""of a run whose hash is compared"""
KB, MB = 1024, 1024 * 1024
SIZES = (4 * KB, 512 * KB)
"""bytes of a message"""
RING = 64 * MB
"""bytes of all slots together: more than caches hold"""
clock = time.process_time


class Tree(NamedTuple):
    """A checkout, and how its code is run."""

    name: str
    root: Path

    @property
    def env(self) -> dict[str, str]:
        return {"PYTHONPATH": str(self.root / "src")}

    @property
    def configs(self) -> dict[str, Path]:
        return {path.stem: path for path in sorted((self.root / "configs").glob("*.toml"))}

    def check(self) -> None:
        """Raise if another tree's code would be measured."""
        argv = [sys.executable, "-c", "import tianji; print(tianji.__file__)"]
        found = Path(run_process(argv, self.env)[0].strip())
        if not found.is_relative_to(self.root):
            sys.exit(f"{self.name} would be measured by {found}, which is not in {self.root}")

    def train(self, config: str, *overrides: str, timeout: float = 900.0) -> dict[str, Any]:
        """The result of a run."""
        with tempfile.TemporaryDirectory() as runs:
            argv = [
                sys.executable, "-m", "tianji", "train", str(self.configs[config]), *overrides,
                "--json", "--plain", "--runs", runs,
            ]  # fmt: skip
            return run_json(argv, self.env, timeout)


@contextlib.contextmanager
def checked_out(revision: str) -> Iterator[Tree]:
    """Another revision in a folder of its own, which is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve() / "tree"
        _git("worktree", "add", "--detach", str(root), revision)
        try:
            yield Tree("old", root)
        finally:
            _git("worktree", "remove", "--force", str(root))


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def serial(tree: Tree, seconds: float) -> dict[str, float]:
    taken = part(tree, "serial", "ppo_cartpole", seconds)
    return {
        "serial CartPole, steps/s": taken["rate"],
        "serial CartPole, steps/CPU s": taken["steps"] / taken["cpu"],
    }


def local(tree: Tree, seconds: float) -> dict[str, float]:
    spread = ("scale.engine=local", "scale.actors=2")
    result = tree.train("ppo_cartpole", *BARE, *spread, f"stop.seconds={seconds:g}")
    return {
        "local CartPole, steps/s": result["steps_per_s"]["received"],
        "local CartPole, s to the first step": result["start_s"],
    }


def pong(tree: Tree, seconds: float) -> dict[str, float]:
    taken = part(tree, "actor", "ppo_pong", seconds)
    return {"Pong's actor, steps/CPU s": taken["steps"] / taken["cpu"]}


def part(tree: Tree, name: str, config: str, seconds: float) -> dict[str, Any]:
    """What one of PARTS finds in a process of its own, with the code of this tree."""
    argv = [sys.executable, __file__, "--part", name, "--config", str(tree.configs[config])]
    return run_json([*argv, "--seconds", str(seconds)], tree.env)


def serial_run(config: str, seconds: float) -> dict[str, float]:
    """A run in this process, with what it took of the processor from its config to its result."""
    import tianji

    overrides, begun = (*BARE, "scale.engine=serial", f"stop.seconds={seconds:g}"), clock()
    with tempfile.TemporaryDirectory() as runs:
        result = tianji.train(config, overrides, runs=runs).tree()
    rate = result["steps_per_s"]["received"]
    return {"rate": rate, "steps": result["steps"], "cpu": clock() - begun}


def actor_alone(config: str, seconds: float) -> dict[str, float]:
    """An actor whose rollouts are taken at once. Of tianji it uses what all revisions have."""
    from tianji.build import build
    from tianji.config import load_config
    from tianji.driver import Serial
    from tianji.probe import Sink

    built = build(load_config(config, ["scale.engine=serial", "scale.actors=1"]))
    built.learner.begin()
    joined = built.assembly if hasattr(built, "assembly") else built.topology
    sink = Sink(built.transport.inbox(joined.lanes[0]))
    driver = Serial([built.actors[0], sink])

    def step(rollouts: int) -> None:
        while sink.rollouts < rollouts:
            driver.step()

    step(2)
    before, begun = sink.rows, clock()
    while clock() - begun < seconds:
        step(sink.rollouts + 1)
    return {"steps": sink.rows - before, "cpu": clock() - begun}


PARTS: dict[str, Callable[[str, float], dict[str, float]]] = {
    "serial": serial_run, "actor": actor_alone,
}  # fmt: skip


def transfer(tree: Tree, seconds: float) -> dict[str, float]:
    """By the tree's own peer, which knows its transport."""
    found, script = {}, tree.root / "benchmarks" / "peers" / "transfer_tianji.py"
    for size in SIZES:
        cell = {
            "size": size, "actors": 1, "messages": 10**9, "seconds": seconds / len(SIZES),
            "slots": max(8, min(4096, RING // size)),
        }  # fmt: skip
        taken = run_json([sys.executable, str(script), json.dumps(cell)], tree.env)
        what = f"transport, {size // KB} KB"
        found[f"{what}, MB/s"] = taken["rate"] * size / 1e6
        found[f"{what}, CPU us for a message"] = taken["sender_us"] + taken["receiver_us"]
    return found


MEASURES: dict[str, Callable[[Tree, float], dict[str, float]]] = {
    "serial": serial, "local": local, "pong": pong, "transfer": transfer,
}  # fmt: skip


def measured(trees: list[Tree], names: list[str], rounds: int, seconds: float) -> dict[str, Any]:
    """Each figure of both trees, over so many rounds; first comes now the one, now the other."""
    samples: dict[str, dict[str, list[float]]] = {}
    for at, name in itertools.product(range(rounds), names):
        tasks = {tree.name: partial(MEASURES[name], tree, seconds) for tree in trees}
        for tree, (figures,) in interleaved(tasks, 1, at).items():
            for figure, value in figures.items():
                samples.setdefault(figure, {}).setdefault(tree, []).append(value)
    found = {}
    for figure, of in samples.items():
        ratio, low, high = ratio_of_medians(of["new"], of["old"])
        found[figure] = {
            "median": medians(of), "quartiles": {name: quartiles(xs) for name, xs in of.items()},
            "ratio": ratio, "interval": [low, high], "samples": of,
        }  # fmt: skip
    return found


def hashed(trees: list[Tree], configs: list[str]) -> dict[str, dict[str, str]]:
    """What each tree learns from each config: a hash, or why there is none."""

    def one(job: tuple[str, Tree]) -> str:
        config, tree = job
        # The clock decides nothing.
        few = (*BARE, "scale.engine=serial", f"stop.updates={UPDATES}")
        try:
            return str(tree.train(config, *few)["params_sha256"])
        except RuntimeError as error:
            return f"none: {str(error).strip().splitlines()[-1]}"

    jobs = [(config, tree) for config in configs for tree in trees]
    found: dict[str, dict[str, str]] = {}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for (config, tree), sha256 in zip(jobs, pool.map(one, jobs), strict=True):
            of = found.setdefault(config, {})
            of[tree.name] = sha256
            if len(of) == len(trees):
                why = f", {of['new']}" if verdict(of) == "not run" else ""
                print(f"{config}: {verdict(of)}{why}", flush=True)
    return found


def verdict(of: Mapping[str, str]) -> str:
    if all(sha256.startswith("none") for sha256 in of.values()):
        return "not run"
    return "equal" if of["new"] == of["old"] else "DIFFERENT"


def around(samples: Sequence[float]) -> str:
    """The median, and the quartiles."""
    middle, low, high = (
        f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
        for value in (medians({"": samples})[""], *quartiles(samples))
    )
    return f"{middle} [{low}, {high}]"


def shown(of: str) -> str:
    return "none" if of.startswith("none") else of[:12]


def tell(found: dict[str, Any], about: dict[str, Any]) -> None:
    rows = []
    for figure, of in found.items():
        low, high = of["interval"]
        told = [around(samples) for samples in (of["samples"]["new"], of["samples"]["old"])]
        rows.append((figure, *told, f"{of['ratio']:.3f} [{low:.3f}, {high:.3f}]"))
    print(table(("median [quartiles]", "new", "old", "new / old [95 %]"), rows))
    print(save("before", {**about, "figures": found}))


def tell_hashes(hashes: dict[str, dict[str, str]], about: dict[str, Any]) -> None:
    rows = [(name, shown(of["new"]), shown(of["old"]), verdict(of)) for name, of in hashes.items()]
    print(table((f"after {UPDATES} updates", "new", "old", ""), rows))
    print(save("before_hashes", {**about, "updates": UPDATES, "hashes": hashes}))
    if different := [name for name, of in hashes.items() if verdict(of) == "DIFFERENT"]:
        sys.exit(f"different: {', '.join(different)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("revision", nargs="?", help="what this tree is compared with")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--hashes", action="store_true", help="compare what is learnt, instead")
    parser.add_argument("--only", default="", help="measures, or configs, that have this in them")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--config", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        print(json.dumps(PARTS[arguments.part](arguments.config, arguments.seconds)))
        return
    if arguments.revision is None:
        parser.error("a revision is needed")
    commit = _git("rev-parse", f"{arguments.revision}^{{commit}}")
    about = {"revision": arguments.revision, "revision_commit": commit}
    with checked_out(arguments.revision) as old:
        trees = [Tree("new", ROOT), old]
        for tree in trees:
            tree.check()
        if arguments.hashes:
            configs = [name for name in trees[0].configs if name in old.configs]
            tell_hashes(hashed(trees, [n for n in configs if arguments.only in n]), about)
        else:
            names = [name for name in MEASURES if arguments.only in name]
            about |= {"rounds": arguments.rounds, "seconds": arguments.seconds}
            tell(measured(trees, names, arguments.rounds, arguments.seconds), about)


if __name__ == "__main__":
    main()
