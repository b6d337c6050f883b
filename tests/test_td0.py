"""The smallest example learns the values that the chain has in closed form."""

import sys
from pathlib import Path

import numpy as np
import pytest

import tianji
from tianji.algorithm import ALGORITHMS
from tianji.config import load_config
from tianji.env import make_env
from tianji.errors import Refusal
from tianji.testing import check_algorithm

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture
def example(monkeypatch):
    """The example's module, as env.imports would find it; nothing of it is left behind."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setitem(ALGORITHMS, "td0", None)
    import td0

    monkeypatch.setitem(ALGORITHMS, "td0", td0.TD0)
    yield td0
    sys.modules.pop("td0")


def values_of_a_random_walk(n, gamma):
    """V = P (r + gamma V) by the linear system: half of all steps go right, the others left."""
    P, r = np.zeros((n - 1, n - 1)), np.zeros(n - 1)
    for s in range(n - 1):
        P[s, max(0, s - 1)] += 0.5
        if s + 1 < n - 1:
            P[s, s + 1] += 0.5
        else:
            r[s] = 0.5
    return np.linalg.solve(np.eye(n - 1) - gamma * P, r)


@pytest.mark.parametrize("engine", ["serial", "local"])
def test_td0_learns_the_exact_values_of_a_random_walk(example, engine, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES), prepend=":")
    result = tianji.train(EXAMPLES / "td0.toml", [f"scale.engine={engine}"], runs=tmp_path)
    theta = tianji.load(result.run_dir)._policy._theta
    exact = values_of_a_random_walk(5, 0.9)
    assert 0.1 < exact.min() < exact.max() < 0.8
    np.testing.assert_allclose(theta[:4], exact, atol=0.02)


def test_td0_keeps_the_promises_of_an_algorithm(example):
    check_algorithm(example.TD0(), lambda n: make_env("toy/Chain", n, {"anywhere": True}))


def test_td0_refuses_what_it_cannot_do(example):
    tree = {"env": {"id": "toy/Chain"}, "algorithm": {"name": "td0"}, "stop": {"updates": 1}}
    with pytest.raises(Refusal, match=r'relax.gradient = "none"'):
        tianji.build.build(load_config(tree, ["relax.gradient=gac"]))


def test_the_example_is_short():
    assert len((EXAMPLES / "td0.py").read_text().splitlines()) < 120
