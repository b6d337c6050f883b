"""Imports point one way: nouns, then roles and channels, then build, then run."""

import ast
import importlib
import importlib.util
from pathlib import Path

import tianji

ROOT = Path(tianji.__file__).parent
NOUNS = {
    "types", "errors", "role", "role_names", "env", "fault", "team", "algorithm", "ledger",
    "description", "train_state",
}  # fmt: skip
PURE = {"balance", "trigger", "relax"}
PARTS = {
    "store", "returns", "optim", "networks", "distributions", "moments", "frames", "gradients",
    "sumtree", "prioritized", "recurrent", "actor_critic", "corrections", "episodes", "recorded",
    "sight", "columns", "off_policy",
}  # fmt: skip
ROLES = {"actor", "buffer", "learner", "evaluator", "server"}


def imports(path):
    """Modules of tianji that a file imports, at its top or inside."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tianji"):
            rest = (node.module or "").split(".")[1:]
            found |= {rest[0]} if rest else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("tianji.")}
    return found


def module(name):
    return imports(ROOT / f"{name}.py")


def test_nouns_import_only_nouns_and_the_envs_they_name():
    for name in NOUNS:
        assert module(name) <= NOUNS | {"envs"}, name


def test_decisions_are_pure():
    for name in PURE:
        assert module(name) == set(), name
        text = (ROOT / f"{name}.py").read_text()
        assert not any(word in text for word in ("import time", "threading", "open(", "sleep"))


def test_placing_is_pure():
    assert module("placement") == {"role_names"}


def test_judging_and_rebalancing_are_pure():
    assert module("flow") == module("role_names") == set()
    assert module("rebalance") == {"flow"}
    assert module("verdict") == {"flow", "role_names"}
    for name in ("flow", "verdict", "rebalance", "role_names", "placement"):
        text = (ROOT / f"{name}.py").read_text()
        assert not any(word in text for word in ("import time", "threading", "open(", "sleep"))


def test_algorithms_know_no_process_and_no_channel():
    for path in (ROOT / "algorithms").glob("*.py"):
        assert imports(path) <= NOUNS | PARTS, path.name


def test_parts_of_algorithms_know_no_role():
    for name in PARTS:
        assert module(name) <= NOUNS | PARTS, name


def test_transports_know_no_reinforcement_learning():
    for path in (ROOT / "transports").glob("*.py"):
        assert imports(path) <= {"channel", "types", "role"}, path.name
    assert module("channel") <= {"types"}


def test_roles_know_neither_build_nor_run():
    for name in ROLES:
        assert module(name) <= NOUNS | PURE | {"channel", "join", "newest"}, name
    assert module("join") <= NOUNS | {"channel"}
    assert module("newest") <= NOUNS | {"channel"}


def test_a_team_knows_no_algorithm():
    assert module("team") <= {"types", "errors"}


def test_envs_know_no_role():
    for path in (ROOT / "envs").glob("*.py"):
        assert imports(path) <= NOUNS, path.name


def test_roles_do_not_ask_which_engine_or_driver_runs_them():
    for name in ROLES | PARTS | PURE | {"channel"}:
        words = {n.id.lower() for n in ast.walk(ast.parse((ROOT / f"{name}.py").read_text()))
                 if isinstance(n, ast.Name)}  # fmt: skip
        assert words.isdisjoint({"serial", "engine", "driver"}), name


def test_there_is_no_room_without_a_name():
    names = {path.stem for path in ROOT.rglob("*.py")}
    assert names.isdisjoint({"utils", "common", "base", "helpers", "core"})


def test_what_benchmarks_and_scripts_import_is_there():
    """Nothing else runs them all."""
    checkout = ROOT.parents[1]
    for path in (*(checkout / "benchmarks").glob("*.py"), *(checkout / "docs").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tianji"):
                module = importlib.import_module(node.module)
                for alias in node.names:
                    inside = f"{node.module}.{alias.name}"
                    package = hasattr(module, "__path__")
                    there = hasattr(module, alias.name) or (
                        package and importlib.util.find_spec(inside) is not None
                    )
                    assert there, f"{path.name}: {inside}"
