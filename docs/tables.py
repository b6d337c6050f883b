"""Writes the tables in README and docs/ that come from code and results: `python docs/tables.py`.

With --check it writes nothing, and ends with 1 where a page is not in step with the code.
"""

import ast
import contextlib
import dataclasses
import functools
import json
import re
import statistics
import sys
import textwrap
import typing
from pathlib import Path

import numpy as np

from tianji.algorithm import ALGORITHMS, Bound, algorithm_class
from tianji.build import Assembly, assembly
from tianji.config import SECTIONS, Config, load_config
from tianji.errors import Refusal
from tianji.join import Graph, in_peers
from tianji.relax import PRESETS, Relaxation, Sizes, problem, relaxation

DOCS = Path(__file__).resolve().parent
SOURCE = DOCS.parent / "src" / "tianji"
RESULTS = DOCS.parent / "benchmarks" / "results"
BLOCK = re.compile(r"(<!-- generated: ([a-z0-9 ]+) -->\n).*?(<!-- end of generated -->)", re.DOTALL)

WALK = (
    ("envs/gymnasium.py", "GymnasiumEnv", ("step",)),
    ("actor.py", "Actor", ("step", "_begin", "_infer", "_simulate", "_step", "_write", "_push")),
    (
        "buffer.py",
        "Buffer",
        (
            "step",
            "_receive_next",
            "_receive",
            "_room",
            "_serve",
            "_choose",
            "_write_episodes",
            "_grant",
            "_grant_next",
            "_retire",
            "_free",
        ),
    ),
    ("store.py", "Fresh", ("add", "choose", "retired")),
    ("store.py", "Rollouts", ("parts",)),
    (
        "learner.py",
        "Learner",
        ("begin", "step", "_ask", "_take", "_finish", "_push", "_told", "_publish"),
    ),
    (
        "actor_critic.py",
        "Trainer",
        (
            "take",
            "_look",
            "_values",
            "_estimate",
            "_keep",
            "finish",
            "_normalise_advantage",
            "_epochs",
            "_minibatches",
            "_loss",
            "_forward",
            "params",
        ),
    ),
    ("algorithms/ppo.py", "Trainer", ("_objective",)),
)
"""The seven files of the walk: the classes, and their methods that a transition passes."""

BESIDE = (
    ("channel.py", None, ()),
    ("transports/memory.py", "_Pipe", ("grant", "granted", "push", "probe", "release")),
    ("returns.py", None, ("gae",)),
    ("corrections.py", None, ("uncorrected", "clip")),
    ("optim.py", "Optimizer", ("step", "_average", "_adam")),
)
"""What the seven call, for a second reading."""


def lines_of(path: str, owner: str | None, names: tuple[str, ...]) -> int:
    """Lines of these functions; a missing one is an error."""
    body = ast.parse((SOURCE / path).read_text()).body
    if owner is not None:
        body = next(n for n in body if isinstance(n, ast.ClassDef) and n.name == owner).body
    found = {n.name: n for n in body if isinstance(n, ast.FunctionDef)}
    return sum(found[name].end_lineno - found[name].lineno + 1 for name in names)


def walk() -> str:
    rows = ["| file | what a transition passes | lines |", "|---|---|---|"]
    for path, owner, names in WALK:
        called = ", ".join(f"`{name}`" for name in names)
        rows.append(f"| `{path}` | `{owner}`: {called} | {lines_of(path, owner, names)} |")
    total = sum(lines_of(*place) for place in WALK)
    files = {path for path, _, _ in WALK}
    whole = sum(len((SOURCE / path).read_text().splitlines()) for path in files)
    rows.append(f"| | all of it | **{total}** |")
    return "\n".join(rows) + f"\n\nThe seven files have about {round(whole, -2)} lines in all.\n"


def measured() -> str:
    """What benchmarks/results holds: races against a CleanRL-style script, and what roles cost."""
    races = json.loads((RESULTS / "convergence.json").read_text())
    roles = json.loads((RESULTS / "roles.json").read_text())["comparisons"]
    rows = [
        "| from process start to a mean return of | tianji | CleanRL-style | ratio |",
        "|---|---|---|---|",
    ]
    for race in races["races"]:
        ours, theirs = (race["summary"][side] for side in ("tianji", "cleanrl"))
        low, high = race["summary"]["speedup_95"]
        rows.append(
            f"| {race['target']:g}, {race['algorithm'].upper()} CartPole "
            f"| {_race(ours)} | {_race(theirs)} "
            f"| **{1 / race['summary']['speedup']:.2f}** [{1 / high:.2f}, {1 / low:.2f}] |"
        )
    start = races["start"]["over_import"]["tianji train, first env step"]
    rows += ["", "| a role against a bare loop of the same work | tianji | bare | ratio |",
             "|---|---|---|---|"]  # fmt: skip
    for name, comparison in roles.items():
        low, high = comparison["interval"]
        middle, unit = comparison["median"], comparison["unit"]
        rows.append(
            f"| {name} | {middle['tianji']:,.0f} {unit} | {middle['bare']:,.0f} {unit} "
            f"| **{comparison['ratio']:.2f}** [{low:.2f}, {high:.2f}] |"
        )
    machine = races["machine"]
    told = (
        f"`tianji train` makes its first env step after {start[0]:.2f} times what "
        f'`python -c "import torch, gymnasium"` takes. Medians with 95 % intervals; '
        f"{machine['cpu']}, {machine['cores']} cores, one thread for each process, torch "
        f"{machine['torch']}."
    )
    return "\n".join([*rows, "", *textwrap.wrap(told, 119)]) + "\n"


def parallel() -> str:
    """What processes bring: scaling over actors, the pipeline's efficiency, moving data."""
    scaling, pipeline, transfer = (
        json.loads((RESULTS / f"{name}.json").read_text())
        for name in ("scaling", "pipeline", "transfer")
    )
    rows = ["| actors | new steps/s | over one | who waits |", "|---|---|---|---|"]
    for point in scaling["points"]:
        low, high = point["interval"]
        rows.append(
            f"| {point['actors']} | {point['steps_per_s']:,.0f} | **{point['over_first']:.1f}** "
            f"[{low:.1f}, {high:.1f}] | {point['verdict']} |"
        )
    told = (
        f"PPO on LunarLander, one epoch, preset `tianji`, staleness at most "
        f"{max(p['staleness_max'] for p in scaling['points'])}; {_machine(scaling)}."
    )
    rows += ["", *textwrap.wrap(told, 119), ""]
    rows += ["| new steps/s, two cores | engine local | actor alone | learner alone | "
             "local / the slower |", "|---|---|---|---|---|"]  # fmt: skip
    for name, case in pipeline["cases"].items():
        middle, (low, high) = case["median"], case["interval"]
        rows.append(
            f"| {name} | {middle['local']:,.0f} | {middle['actor']:,.0f} | "
            f"{middle['learner']:,.0f} | **{case['ratio']:.2f}** [{low:.2f}, {high:.2f}] |"
        )
    rows += ["", f"{_machine(pipeline)}.", ""]
    sizes = {"65536": "64 KB", "524288": "512 KB", "8388608": "8 MB"}
    rows += [
        f"| MB/s from one actor | {' | '.join(sizes.values())} |",
        "|---|" + "---|" * len(sizes),
    ]
    named = {
        "memcpy": "a memcpy into shared memory", "memcpy, private": "a memcpy into private memory",
        "tianji": "**tianji**", "tianji, copied out": "tianji, and a copy of what came",
    }  # fmt: skip
    for path in (*named, "pyzmq", "mpi4py, buffers", "mpi4py, pickled",
                 "multiprocessing.Queue", "ray"):  # fmt: skip
        if any(path in transfer["sizes"][size] for size in sizes):
            cells = [
                f"{transfer['sizes'][size][path]['MB/s']:,.0f}"
                if path in transfer["sizes"][size]
                else "–"
                for size in sizes
            ]
            rows.append(f"| {named.get(path, path)} | {' | '.join(cells)} |")
    rows += [
        "",
        f"{_machine(transfer)}. Over tianji, data is read where it lies; the others copy it.",
    ]
    return "\n".join(rows) + "\n"


def chaos() -> str:
    """What was promised of every fault, and how long it took to keep it."""
    results = json.loads((RESULTS / "chaos.json").read_text())
    phases = ("start-up", "warm-up", "training", "checkpointing", "shutdown")
    found: dict[tuple[str, str], dict[str, dict]] = {}
    for case in results["cases"]:
        found.setdefault((case["deed"], case["role"]), {})[case["phase"]] = case
    rows = [
        f"| what | to | promise | {' | '.join(phases)} |",
        "|---|---|---|" + "---|" * len(phases),
    ]
    for (deed, role), cases in found.items():
        told = cases.get("training", next(iter(cases.values())))["promise"]
        cells = [_case(cases[phase]) if phase in cases else "" for phase in phases]
        what = deed if deed.isupper() else f"an env {deed.replace('nans', 'gives NaN')}"
        what = what.replace("slows", "is slow")
        rows.append(f"| {what} | {role} | {told} | {' | '.join(cells)} |")
    kept = sum(case["ok"] for case in results["cases"])
    total = f"{kept} of {len(results['cases'])} kept; {_machine(results)}."
    return "\n".join([*rows, "", total]) + "\n"


def presets() -> str:
    """Every preset: what it sets, its edges, and what it is for."""
    rows = [
        "| preset | I: parameters | II: actions | III: samples | "
        "`lead` | `late` | `take` | `start` | beside | for |",
        "|" + "---|" * 10,
        '| any, with `scale.engine = "serial"` | inside | inside | inside | | | | | '
        "one process | both |",
    ]
    plain = Relaxation()
    for name in PRESETS:
        groups = 1 if any(_fits(name, case, 1) for case in CASES) else 2
        both = {case: relax for case in CASES if (relax := _fits(name, case, groups)) is not None}
        relax, *other = both.values()
        cells = [f"`{name}`", *relax.edges.values(), f"{relax.lead:g}".replace("inf", "∞")]
        if other and other[0].lead != relax.lead:
            cells[-1] += f"; replay {other[0].lead:g}"
        cells += [f"`{word}`" for word in (relax.late, relax.take, relax.start)]
        own = {
            f.name: getattr(relax, f.name)
            for f in dataclasses.fields(relax)
            if f.name not in ("lead", "late", "take", "start")
            and getattr(relax, f.name) != getattr(plain, f.name)
        }
        cells.append(", ".join(f"{key} `{value}`" for key, value in own.items()))
        told = "both" if other else next(iter(both))
        cells.append(told + (", several groups" if groups > 1 else ""))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


CASES = ("on-policy", "replay")
"""kinds of algorithms"""


def _fits(name: str, case: str, groups: int) -> Relaxation | None:
    """The preset for this kind of algorithm; None where it is refused."""
    sizes = Sizes(case == "on-policy", alone=False, actors=2, groups=groups)
    relax = relaxation(name, sizes, {})
    return relax if problem(relax, sizes) is None else None


def fates() -> str:
    """What groups join of all that is learnt, as the trainers say it."""
    rows = ["| algorithm | averaged | each group's own |", "|---|---|---|"]
    for name in sorted(ALGORITHMS):
        if not isinstance(ALGORITHMS[name], str):
            continue
        joined = _some_run(name)
        for env in joined.spare:
            env.close()
        found: dict[str, list[str]] = {"averaged": [], "local": []}
        trainer = joined.config.algorithm.trainer(joined.spec)
        for leaf, fate in trainer.state.fates().items():
            group, _, rest = leaf.partition(".")
            many = "." in rest and group not in ("obs", "return", "state", "value_moments")
            short = f"`{group}.*`" if many else f"`{leaf}`"
            if short not in found[fate]:
                found[fate].append(short)
        rows.append(f"| `{name}` | {', '.join(found['averaged'])} | {', '.join(found['local'])} |")
    return "\n".join(rows) + "\n"


def _some_run(algorithm: str) -> Assembly:
    """Of an algorithm, in the first of some envs that it can act in."""
    for env in ("CartPole-v1", "Pendulum-v1", "mpe/simple_spread", "skirmish/3m"):
        tree = {"env": {"id": env}, "algorithm": {"name": algorithm}, "stop": {"updates": 1}}
        with contextlib.suppress(Refusal):
            return assembly(load_config(tree))
    raise ValueError(f"{algorithm} acts in none of the envs that are tried")


def graphs() -> str:
    """How much of the distance between groups is left after each round, in the worst case."""
    sizes = (2, 3, 4, 8, 16)
    rows = [
        f"| `join.graph` | a group pushes | {' | '.join(f'{n} groups' for n in sizes)} |",
        "|---|---|" + "---|" * len(sizes),
    ]
    pushed = {"complete": "to all others", "ring": "one model", "exponential": "one model"}
    for graph, told in pushed.items():
        cells = [f"{_left(typing.cast(Graph, graph), n):.2f}" for n in sizes]
        rows.append(f"| `{graph}` | {told} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _left(graph: Graph, groups: int) -> float:
    """The worst distance to the mean after one cycle of rounds, over that before, for one round."""
    cycle = (groups - 1).bit_length() if graph == "exponential" else 1
    whole = np.eye(groups)
    for number in range(cycle):
        mix = np.eye(groups)
        for group in range(groups):
            peers = in_peers(graph, number, group, groups)
            for peer in peers:
                mix[group, peer] += 1 / (len(peers) + 1)
                mix[group, group] -= 1 / (len(peers) + 1)
        whole = mix @ whole
    left = np.linalg.norm(whole - 1 / groups, 2)
    return float(left if left > 1e-9 else 0.0) ** (1 / cycle)


def _case(case: dict) -> str:
    if not case["ok"]:
        return "**not kept**"
    return "kept" if case["recovered_s"] is None else f"{case['recovered_s']:.2f} s"


def groups() -> str:
    """What several groups bring, on a simulated load."""
    results = json.loads((RESULTS / "groups.json").read_text())
    rows = [
        "| groups | steps received/s | over one | updates/s | over one | waits for a group |",
        "|---|---|---|---|---|---|",
    ]
    for name, case in results["cases"].items():
        for point in case["points"]:
            over, middle = point["over_first"], point["median"]
            cells = []
            for key, digits in (("received", 0), ("updates", 1)):
                low, high = point["interval"][key]
                cells += [f"{middle[key]:,.{digits}f}",
                          f"**{over[key]:.2f}** [{low:.2f}, {high:.2f}]"]  # fmt: skip
            waits = ", `join.patience = 0`" if point["waits"] else ""
            rows.append(
                f"| {point['groups']}, {name.upper()}{waits} | {' | '.join(cells)} "
                f"| {100 * middle['wait_group']:.1f} % |"
            )
    told = (
        f"Medians of {results['rounds']} runs each of {results['seconds']:g} s, in turn, with 95 % "
        f"intervals of the ratio; {_machine(results)}, {_loaded(results)}."
    )
    return "\n".join([*rows, "", *textwrap.wrap(told, 119)]) + "\n"


def atari() -> str:
    """What an actor on Pong costs beside the game and the network, and what is quicker."""
    results = json.loads((RESULTS / "atari.json").read_text())
    rows = ["| Pong | first | second | ratio |", "|---|---|---|---|"]
    for name, case in results["comparisons"].items():
        (first, second), (low, high) = case["median"].values(), case["interval"]
        rows.append(
            f"| {name} | {first:,.0f} {case['unit']} | {second:,.0f} {case['unit']} "
            f"| **{case['ratio']:.2f}** [{low:.2f}, {high:.2f}] |"
        )
    told = (
        f"Medians of {results['rounds']} rounds in turn, with 95 % intervals; one core but for "
        f"halves, which have two, and an actor in bfloat16; {_machine(results)}, "
        f"{_loaded(results)}."
    )
    return "\n".join([*rows, "", *textwrap.wrap(told, 119)]) + "\n"


def trace() -> str:
    """What being traced costs."""
    results = json.loads((RESULTS / "trace.json").read_text())
    rows = [
        "| an actor's step | takes | events | of that, trace | share | loop with / without |",
        "|---|---|---|---|---|---|",
    ]
    for name, case in results["cases"].items():
        loop, (low, high) = case["loop"], case["loop"]["interval"]
        rows.append(
            f"| {name} | {loop['step_ns']['without'] / 1000:,.0f} µs "
            f"| {loop['events_per_step']:.2f} | {case['events_ns']:.0f} ns "
            f"| **{100 * case['share']:.2g} %** | {loop['ratio']:.3f} [{low:.3f}, {high:.3f}] |"
        )
    keep, write, writes = (results["events"][n]["ns"] for n in ("keep", "write", "writes"))
    runs = [
        f"{case['runs'][engine]['ratio']:.3f} [{low:.3f}, {high:.3f}] ({name}, {engine})"
        for name, case in results["cases"].items()
        if case["runs"] is not None
        for engine in ("local", "serial")
        for low, high in [case["runs"][engine]["interval"]]
    ]
    told = (
        f"Keeping an event takes {keep:.0f} ns and writing it {write:.0f} ns; each write takes "
        f"{writes / 1000:.0f} µs beside that, four times a second, which the share includes. Of "
        f"whole runs, in turn, the processor's time for a step with the trace is "
        f"{', '.join(runs)} of that without it. {_machine(results)}, {_loaded(results)}."
    )
    return "\n".join([*rows, "", *textwrap.wrap(told, 119)]) + "\n"


def planned() -> str:
    """What plans predicted, and what runs then did."""
    rows = [
        "| config | plan | predicted, new steps/s | measured | error | of each profile "
        "| of the best | ways |",
        "|---|---|---|---|---|---|---|---|",
    ]
    told, swept_well, notes = set(), list[str](), dict[str, list[str]]()
    cases = [json.loads(path.read_text()) for path in (RESULTS / "plan").glob("*_cores.json")]
    for case in sorted(cases, key=lambda case: (case["machine"]["cores"], case["name"])):
        if not case["ways"]:  # a sweep that was cut has none yet
            continue
        way = next(way for way in case["ways"] if way["chosen"])
        swept, count = case.get("sweep"), len(case["ways"])
        ways = f"all {count}" if count > 1 else "the only one"
        if swept:
            ways = f"{count}, the fastest of {len(swept)}"
            near = [abs(np.mean(one["predictions"]) / np.mean(one["new"]) - 1) for one in swept]
            share = f"{100 * np.mean(np.array(near) <= 0.15):.0f} %"
            swept_well.append(f"`{case['name']}` {share} of {len(swept)}")
        rows.append(
            f"| `{case['name']}`, {case['machine']['cores']} cores | {way['words']} "
            f"| {way['predicted']:,.0f} | {way['measured']:,.0f} | **{way['error']:+.1%}** "
            f"| {_each(way['errors'], bool(swept))} | {_reached(case) if count > 1 else '–'} "
            f"| {ways} |".replace("%", " %")
        )
        told |= {f"{_machine(one)}: `{one['command']}`." for one in (case, *case.get("before", ()))}
        if "note" in case:
            notes.setdefault(case["note"], []).append(f"`{case['name']}`")
    note = (
        "What is predicted, what is measured and the error are medians of their own, so that an "
        "error is not the quotient of the others. *Of each profile* has the errors that the median "
        "is of; where there was a sweep, its own comes first. *Of the best* has an interval where "
        "five turns or more were made, and what each round came to where rounds differ. Of "
        "all ways of a sweep, chosen or not, each run once or a few times, this share was "
        f"predicted within 15 %: {', '.join(swept_well)}. "
        + " ".join(f"Of {', '.join(names)} on 16 cores: {note}." for note, names in notes.items())
    )
    return "\n".join([*rows, "", *textwrap.wrap(note, 119), "", *sorted(told)]) + "\n"


def _reached(case: dict[str, typing.Any]) -> str:
    """What a plan reached of the best: with an interval, where there were turns to tell it by, and
    by rounds, with their turns."""
    told = f"{case['reached']:.2f}"
    if case["interval"] is not None:
        low, high = case["interval"]
        told += f" [{low:.2f}, {high:.2f}]"
    mine = next(way for way in case["ways"] if way["chosen"])
    turns = [len(runs) for runs in mine["runs"]]
    rounds = [f"{share:.2f}" for share in case["rounds"]]
    if len(set(rounds)) == 1:
        return f"{told}, {sum(turns)} turn{'s' * (sum(turns) > 1)}"
    return f"{told}; rounds of {', '.join(map(str, turns))} turns: {', '.join(rounds)}"


def _each(errors: list[float], swept: bool) -> str:
    """Errors in whole percent, that of a sweep before those of rounds."""
    told = [f"{100 * error:+.0f}" for error in errors]
    first = f"{told.pop(0)}; " if swept and len(told) > 1 else ""
    return f"{first}{', '.join(told)}%"


def knee() -> str:
    """Production and consumption over the number of actors, and what moves the knee."""
    results = json.loads((RESULTS / "knee.json").read_text())
    seconds = {point["actors"]: point["seconds"] for point in results["to_target"]}
    rows = [
        "| actors, one learner | could make, steps/s | consumed | predicted | who waits "
        f"| seconds to {results['target']:g} |",
        "|---|---|---|---|---|---|",
    ]
    for point in results["series"]["one learner"]:
        rows.append(
            f"| {point['actors']} | {point['produced_if_unhindered']:,.0f} "
            f"| {point['consumed']:,.0f} | {point['predicted']:,.0f} "
            f"| {point['verdict'].partition(':')[0]} | {seconds[point['actors']]:.1f} |"
        )
    counts = sorted({p["actors"] for points in results["series"].values() for p in points})
    rows += ["", f"| consumed (predicted), thousand steps/s | {' | '.join(map(str, counts))} |",
             "|---" * (1 + len(counts)) + "|"]  # fmt: skip
    for name, points in results["series"].items():
        cells = {p["actors"]: f"{p['consumed'] / 1e3:.0f} ({p['predicted'] / 1e3:.0f})"
                 for p in points}  # fmt: skip
        rows.append(f"| {name} | {' | '.join(cells.get(n, '') for n in counts)} |")
    errors = {(name, p["actors"]): p["predicted"] / p["consumed"] - 1
              for name, points in results["series"].items() for p in points}  # fmt: skip
    near = sum(abs(error) <= 0.15 for error in errors.values())
    low, high = min(errors, key=errors.__getitem__), max(errors, key=errors.__getitem__)
    said = (
        (
            f"{near} of these {len(errors)} predictions are within 15 %; the furthest are "
            f"{errors[low]:+.0%} ({low[0]}, {low[1]} actors) and {errors[high]:+.0%} ({high[0]}, "
            f"{high[1]} actors)."
        )
        .replace("%", " %")
        .replace("15  %", "15 %")
    )
    rows += ["", said, "", *_groups(results["groups"])]
    commands = [f"`{case['command']}`" for case in (results, *results.get("before", ()))]
    told = (
        f"`{results['config']}` with {', '.join(f'`{key}`' for key in results['overrides'])}; "
        f"{_machine(results)}. "
    )
    return "\n".join([*rows, "", *textwrap.wrap(told, 119), "", *commands]) + "\n"


def _groups(points: list[dict[str, typing.Any]]) -> list[str]:
    """What groups bring, beside as many runs at once."""
    rows = [
        "| two actors and a learner each | received, steps/s | over one | consumed | over one |",
        "|---|---|---|---|---|",
    ]
    one = next(point for point in points if point["groups"] == 1)
    for point in sorted(points, key=lambda point: (point["groups"], not point["together"])):
        count = point["groups"]
        what = f"{count} group{'s' * (count > 1)}" if point["together"] else f"{count} runs at once"
        cells = (f"{point[key]:,.0f} | {point[key] / one[key]:.2f}"
                 for key in ("received", "consumed"))  # fmt: skip
        rows.append(f"| {what} | {' | '.join(cells)} |")
    return rows


def uneven() -> str:
    """What a plan's arithmetic says of each preset where all times are known, and what is so."""
    results = json.loads((RESULTS / "uneven.json").read_text())
    cases = list(dict.fromkeys((way["spread"], way["update"]) for way in results["ways"]))
    heads = [
        f"{'equal actors' if not spread else f'± {spread:.0%}'}, update {update:g}"
        for spread, update in cases
    ]
    rows = [
        f"| updates/s | {' | '.join(heads)} |".replace("%", " %"),
        "|---" * (1 + len(cases)) + "|",
    ]
    errors = []
    for relax in dict.fromkeys(way["relax"] for way in results["ways"]):
        cells = []
        for case in cases:
            way = next(
                way for way in results["ways"]
                if (way["relax"], way["spread"], way["update"]) == (relax, *case)
            )  # fmt: skip
            error = way["predicted"] / way["measured"] - 1
            errors.append(abs(error))
            cells.append(f"{way['measured']:.1f} ({error:+.1%})".replace("%", " %"))
        rows.append(f"| `{relax}` | {' | '.join(cells)} |")
    told = (
        f"Measured, and how much more was predicted; {statistics.median(errors):.1%} in the median "
        f"of {len(errors)}, {max(errors):.1%} at most: `{results['command']}`."
    ).replace("%", " %")
    return "\n".join([*rows, "", *textwrap.wrap(told, 119)]) + "\n"


def lag() -> str:
    """How learning slows as staleness grows."""
    results = json.loads((RESULTS / "lag.json").read_text())
    rows = [
        "| | staleness, mean | steps to the target | 95 % | over New |",
        "|---|---|---|---|---|",
    ]
    for name, case in results["cases"].items():
        low, high = case["interval"]
        rows.append(
            f"| {name} | {case['staleness']:.2f} | {case['mean']:,.0f} | {low:,.0f} to {high:,.0f} "
            f"| **{case['over_new']:.2f}** |"
        )
    seeds = len(results["cases"]["New"]["steps"])
    late = sum(seeds - case["reached"] for case in results["cases"].values())
    reached = f"{late} runs did not reach" if late else "all of which reached"
    told = (
        f"Means of {seeds} seeds of `{results['config']}`, {reached} the target: "
        f"`{results['command']}`. Engine serial, so that nothing depends on speed."
    )
    return "\n".join([*rows, "", *textwrap.wrap(told, 119)]) + "\n"


def supervision() -> str:
    """What being watched costs an actor."""
    results = json.loads((RESULTS / "supervision.json").read_text())
    rows = [
        "| an actor's step | takes | of that, supervision | share | loop with / without |",
        "|---|---|---|---|---|",
    ]
    for name, case in results["cases"].items():
        loop, (low, high) = case["loop"], case["loop"]["interval"]
        rows.append(
            f"| {name} | {loop['step_ns']['without'] / 1000:,.0f} µs "
            f"| {case['events_ns']:.0f} ns | **{100 * case['share']:.2g} %** "
            f"| {loop['ratio']:.3f} [{low:.3f}, {high:.3f}] |"
        )
    beat, step = (results["events"][name]["ns"] for name in ("beat", "step"))
    looks = results["launcher"]
    runs = results["cases"]["CartPole, 8 envs"]["runs"]["actor_ns"]
    low, high = runs["interval"]
    told = (
        f"A beat takes {beat:.0f} ns, and a step of the envs has a little more than two; noting it "
        f"takes {step:.0f} ns. The launcher's look at {looks['hosts']} hosts takes "
        f"{looks['look_us']:.1f} µs, {looks['looks_per_s']:g} times a second. Of whole runs, in "
        f"turn, the actor's time for a step with supervision is {runs['ratio']:.2f} [{low:.2f}, "
        f"{high:.2f}] of that without it. {_machine(results)}, {_loaded(results)}."
    )
    return "\n".join([*rows, "", *textwrap.wrap(told, 119)]) + "\n"


def restart() -> str:
    """What the death of an actor costs."""
    results = json.loads((RESULTS / "restart.json").read_text())
    told = {
        "detected": "from SIGKILL to the line of `faults.jsonl`",
        "restarted": "from there to the successor's first step, less what its env takes",
        "lost": "production of that actor lost beyond detection, at its usual rate",
    }
    cases = results["cases"]
    heads = [f"env {name}, median | max" for name in cases]
    rows = [f"| seconds | {' | '.join(heads)} |", "|---|" + "---|---|" * len(cases)]
    for key, words in told.items():
        cells = []
        for case in cases.values():
            figure = case["figures"][key]
            cells.append(f"**{figure['median']:.2f}** | {figure['max']:.2f}")
        rows.append(f"| {words} | {' | '.join(cells)} |")
    kills = [len(case["kills"]) for case in cases.values()]
    half = max(case["figures"]["half_made"]["max"] for case in cases.values())
    words = (
        f"{' and '.join(map(str, kills))} kills; of rollouts that were half made, {half:.0f} steps "
        f"of each env were lost at most; {_machine(results)}, {_loaded(results)}."
    )
    return "\n".join([*rows, "", *textwrap.wrap(words, 119)]) + "\n"


def particles() -> str:
    """What it brings to step particle worlds together."""
    results = json.loads((RESULTS / "mpe.json").read_text())
    head = f"{results['envs']} of ours"
    rows = [f"| env steps/s | {head} | mpe2 | ratio of medians |", "|---|---|---|---|"]
    for world, found in results["comparisons"].items():
        ours, theirs = found["median"]["tianji"], found["median"]["mpe2"]
        low, high = found["interval"]
        ratio = f"**{found['ratio']:.0f}** [{low:.0f}, {high:.0f}]"
        rows.append(f"| `mpe/{world}` | {ours:,.0f} | {theirs:,.0f} | {ratio} |")
    words = f"{_machine(results)}, {_loaded(results)}."
    return "\n".join([*rows, "", *textwrap.wrap(words, 119)]) + "\n"


def learning() -> str:
    """What every algorithm came to, over seeds."""
    rows = [
        "| config | chance | target | reached | came to | env steps | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    notes, machines = [], {}
    for path in sorted((RESULTS / "learning").glob("*.json")):
        results = json.loads(path.read_text())
        runs, name = results["runs"], results["config"]
        won = results["by"] == "win_rate"
        say = "{:.0%}".format if won else "{:.4g}".format
        target = (
            "" if results["target"] is None else f"{'won ' if won else ''}{say(results['target'])}"
        )
        reached = "" if not target else f"{sum(r['reached'] for r in runs)} of {len(runs)}"
        cells = [
            ", ".join(say(r["value"]) for r in runs),
            ", ".join(f"{r['steps'] / 1e6:.2f} M" for r in runs),
            ", ".join(f"{r['total_s']:.0f}" for r in runs),
        ]
        where = machines.setdefault(_machine(results), len(machines) + 1)
        head = f"[`{name}`](../configs/{name}.toml)<sup>{where}</sup>"
        rows.append(
            f"| {head} | {say(results['chance'])} | {target} | {reached} | {' | '.join(cells)} |"
        )
        notes.append(f"{results['command']}")
    told = [f"{number}: {machine}." for machine, number in machines.items()]
    commands = ["```", *dict.fromkeys(notes), "```"]
    return "\n".join([*rows, "", " ".join(told), "", "The commands:", "", *commands]) + "\n"


def _loaded(results: dict) -> str:
    return f"used by others, too (load {results['machine']['load_1min']:.1f})"


def _machine(results: dict) -> str:
    machine = results["machine"]
    return f"{machine['cpu'].replace('(R)', '')}, {machine['cores']} cores"


def _race(side: dict) -> str:
    """Seconds, env steps, and how many runs reached the target."""
    steps = f"{side['steps_median'] / 1000:.0f} k steps"
    return f"{side['total_s_median']:.1f} s, {steps}, {side['reached']} of {side['runs']}"


def words(kind: object) -> str:
    """A type of the config, in words."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        bounds = [str(b) for b in arguments[1:] if isinstance(b, Bound)]
        return ", ".join([words(arguments[0]), *bounds])
    if origin is typing.Literal:
        return " or ".join(f"`{word}`" for word in arguments)
    if origin is tuple:
        return f"list of: {words(arguments[0])}"
    if origin is dict:
        return "table"
    if arguments:
        return " or ".join(words(a) for a in arguments if a is not type(None))
    return {int: "whole number", float: "number", str: "text", bool: "`true` or `false`"}[kind]


def keys(section: str, kind: type, values: dict[str, tuple[object, str]]) -> str:
    """The table of one section."""
    hints = typing.get_type_hints(kind, include_extras=True)
    rows = ["| key | what it may be | default | meaning |", "|---|---|---|---|"]
    if section == "algorithm":
        rows.append("| `algorithm.name` | text | must be set | which algorithm |")
    for f in dataclasses.fields(kind):
        key = f"{section}.{f.name.removesuffix('_')}"
        value, meaning = values[key]
        must = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        written = json.dumps(value).replace("Infinity", "inf")  # as TOML has it
        default = "must be set" if must else "none" if value is None else f"`{written}`"
        rows.append(f"| `{key}` | {words(hints[f.name])} | {default} | {meaning} |")
    return "\n".join(rows) + "\n"


MEASURED = (
    measured, parallel, chaos, groups, supervision, trace, restart, learning, atari, particles,
    planned, knee, uneven, lag,
)  # fmt: skip
WHOLE = {make.__name__: make for make in (walk, presets, fates, graphs, *MEASURED)}
"""what is made by a function of its own"""


@functools.cache
def defaults(algorithm: str) -> dict[str, tuple[object, str]]:
    """What every key is where nothing is set, and its meaning."""
    tree = {"env": {"id": "CartPole-v1"}, "algorithm": {"name": algorithm}}
    rows = load_config({**tree, "stop": {"return": 0}}).rows()
    values = {key: (value, meaning) for key, value, _, meaning in rows}
    return values | {"stop.return": (None, values["stop.return"][1])}


def table(name: str) -> str:
    """The generated text of this name."""
    if name in WHOLE:
        return WHOLE[name]()
    section, _, which = name.partition(" ")
    values = defaults(which or "ppo")
    if section == "seed":
        default = Config.__dataclass_fields__["seed"].default
        return (
            "| key | what it may be | default | meaning |\n|---|---|---|---|\n"
            f"| `seed` | whole number, at least 0 | `{default}` | {values['seed'][1]} |\n"
        )
    kind = algorithm_class(which) if section == "algorithm" else SECTIONS[section]
    return keys(section, kind, values)


def expected_names() -> set[str]:
    """What the pages must hold: every section and every algorithm that is shipped."""
    shipped = {f"algorithm {name}" for name, where in ALGORITHMS.items() if isinstance(where, str)}
    return {
        *WHOLE,
        "seed",
        *(s for s in SECTIONS if s != "algorithm"),
        *shipped,
    }


def main(check: bool) -> int:
    behind, found = [], set()
    for page in [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))]:
        text = page.read_text()
        found |= {match[2] for match in BLOCK.finditer(text)}
        made = BLOCK.sub(lambda match: match[1] + table(match[2]) + match[3], text)
        if made != text:
            behind.append(page.name)
            if not check:
                page.write_text(made)
    if missing := expected_names() - found:
        print(f"no page holds the table of: {', '.join(sorted(missing))}")
        return 1
    if behind:
        said = "not in step with the code; run `python docs/tables.py`" if check else "written"
        print(f"{', '.join(behind)}: {said}")
    return int(check and bool(behind))


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv[1:]))
