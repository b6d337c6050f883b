"""What there is to choose from: algorithms, presets, shipped configs, environments."""

from __future__ import annotations

import ast
import importlib.util
import textwrap
import tomllib
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from tianji.algorithm import ALGORITHMS
from tianji.config import shipped_configs
from tianji.env import env_names
from tianji.relax import PRESETS, Sizes, problem, relaxation

FAMILIES: tuple[tuple[str, str, str | None, str], ...] = (
    ("classic control", "CartPole-v1, Acrobot-v1, Pendulum-v1, MountainCar-v0", None, "gymnasium"),
    ("toy text", "FrozenLake-v1, CliffWalking-v1, Blackjack-v1", None, "gymnasium"),
    ("box2d", "LunarLander-v3, BipedalWalker-v3, CarRacing-v3", "box2d", "Box2D"),
    ("Atari", "ALE/Pong-v5, ALE/Breakout-v5, and every other game of ale-py", "atari", "ale_py"),
    ("MinAtar", "MinAtar/Breakout-v1, MinAtar/Freeway-v1", "minatar", "minatar"),
    ("MuJoCo", "HalfCheetah-v5, Hopper-v5, Humanoid-v5", "mujoco", "mujoco"),
    ("particles, several agents", "mpe/simple_spread, mpe/simple_tag, mpe/simple_adversary", None,
     "numpy"),
    ("PettingZoo, several agents", "pettingzoo/mpe2.simple_spread_v3, or any parallel env's module",
     "mpe", "pettingzoo"),
    ("skirmishes, several agents", "skirmish/3m, skirmish/8m, skirmish/2s3z, skirmish/5m_vs_6m",
     None, "numpy"),
    ("SMAX, several agents", "smax/3m, smax/8m, smax/2s3z, smax/5m_vs_6m", "smax", "jaxmarl"),
    ("StarCraft II, several agents", "smac/3m, and every other map of SMAC", None, "smac.env"),
    ("any registered Gymnasium id", "env.imports names the module that registers it", None,
     "gymnasium"),
)  # fmt: skip
"""name, examples, the extra that installs it, the module that shows it is there"""
WIDTH, INDENT = 119, 23


def catalogue() -> dict[str, Any]:
    return {
        "algorithms": {name: _about(where) for name, where in sorted(ALGORITHMS.items())},
        "presets": {name: _preset(name) for name in PRESETS},
        "configs": {path.stem: _config(path) for path in shipped_configs()},
        "envs": [
            {
                "family": family,
                "examples": examples,
                "extra": extra,
                "installed": _is_there(module),
            }
            for family, examples, extra, module in FAMILIES
        ]
        + [{"family": "toys with known answers",
            "examples": ", ".join(name for name in env_names() if name.startswith("toy/")),
            "extra": None, "installed": True}],
    }  # fmt: skip


def told(listed: dict[str, Any]) -> str:
    lines = ["algorithms (algorithm.name)"]
    lines += [_row(name, about) for name, about in listed["algorithms"].items()]
    lines += ["", "presets (scale.relax): how parameters reach acting (I), actions simulating (II)"]
    lines += [
        "and samples learning (III): inside a process, waiting, within a bound, free, or live, at"
    ]
    lines += ["every step; with engine serial all three stay inside"]
    for name, preset in listed["presets"].items():
        edges = ", ".join(f"{edge} {word}" for edge, word in preset["edges"].items())
        only = "" if len(preset["for"]) > 1 else f" ({preset['for'][0]} only)"
        only += " (several groups)" if preset["groups"] else ""
        lines += [_row(name, f"{edges}{only}"), _row("", preset["about"])]
    lines += ["", "shipped configs (tianji train NAME)"]
    lines += [_row(name, c["expect"]) for name, c in listed["configs"].items()]
    lines += ["", "environments (env.id)"]
    for env in listed["envs"]:
        get = f"pip install 'tianji[{env['extra']}]'" if env["extra"] else "see docs/smac.md"
        need = "" if env["installed"] else f" [{get}]"
        about = f"  {env['family']}: {env['examples']}{need}"
        lines += textwrap.wrap(about, WIDTH, subsequent_indent=" " * 4, break_on_hyphens=False)
    return "\n".join(lines)


def _row(name: str, about: str) -> str:
    """A name, and beside it what it is, in as many lines as that takes."""
    beside = " " * INDENT
    wrapped = textwrap.wrap(about, WIDTH, initial_indent=beside, subsequent_indent=beside)
    return f"  {name:<20} " + "\n".join(wrapped)[INDENT:]


def _is_there(module: str) -> bool:
    """Could it be imported? PyPI has another package that is called smac."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # what holds it is not there
        return False


def _preset(name: str) -> dict[str, Any]:
    """What a preset says of itself, its edges with processes, and which algorithms it is for."""
    sizes = {
        case: Sizes(on_policy=case == "on-policy", alone=False, actors=2, groups=2)
        for case in ("on-policy", "replay")
    }
    refused = {
        (case, groups): problem(relaxation(name, theirs, {}), theirs) is not None
        for case, size in sizes.items()
        for groups in (1, 2)
        for theirs in (replace(size, groups=groups),)
    }
    return {
        "about": " ".join((PRESETS[name].__doc__ or "").split()),
        "edges": PRESETS[name](sizes["on-policy"]).edges,
        "for": [case for case in sizes if not refused[case, 2]],
        "groups": all(refused[case, 1] for case in sizes),
    }


def _about(where: str | type[Any]) -> str:
    """What an algorithm's module says first, read without importing it: torch is slow."""
    if not isinstance(where, str):
        return _first(where.__doc__)
    spec = importlib.util.find_spec(where.partition(":")[0])
    assert spec is not None
    assert spec.origin is not None
    return _first(ast.get_docstring(ast.parse(Path(spec.origin).read_text())))


def _first(text: str | None) -> str:
    """The first paragraph, in one line."""
    return " ".join((text or "").strip().partition("\n\n")[0].split())


def _config(path: Path) -> dict[str, Any]:
    """A shipped config: what its header promises, and what it is."""
    text = path.read_text()
    header = takewhile(lambda line: line.startswith("#"), text.splitlines())
    expect = _first("\n".join(line.lstrip("# ") for line in header).partition("Expect: ")[2])
    tree = tomllib.loads(text)
    return {
        "path": str(path),
        "expect": expect,
        "env": tree["env"]["id"],
        "algorithm": tree["algorithm"]["name"],
    }
