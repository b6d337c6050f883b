"""The soak tells what leaks from what is taken once, or comes and goes."""

import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def judged(monkeypatch):
    """The verdict on a process with these samples, one every 2 s, the first third left out."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import soak

    def judge(mib, descriptors, expected=200):
        at = 2.0 * np.arange(1, 301)
        rss = np.broadcast_to(mib, 300) * 2**20
        process = soak.Sampled("actor-0", 1, list(at), list(rss), list(descriptors))
        return process.judged(200, expected)

    yield judge
    for name in ("soak", "measure"):
        sys.modules.pop(name, None)


FLAT, NOISE = np.full(300, 9), np.random.default_rng(0).normal(0, 0.05, 300)
HOURS = np.arange(300) * 2 / 3600


@pytest.mark.parametrize(
    ("mib", "descriptors", "trouble"),
    [
        (100 + NOISE, FLAT, ""),
        (100 + NOISE + 8 * HOURS, FLAT, ""),
        (100 + NOISE + 3 * (np.arange(300) > 250), FLAT, ""),
        (100 + NOISE + 30 * (np.arange(300) < 90), FLAT, ""),
        (100 + NOISE + 40 * HOURS, FLAT, "memory grows"),
        (100 + NOISE, FLAT + 3 * (np.arange(300) % 3 == 0), ""),
        (100 + NOISE, FLAT + np.arange(300) // 100, "descriptors grow"),
        (100 + NOISE + 40 * HOURS, FLAT + np.arange(300) // 50,
         "memory grows and descriptors grow"),
    ],
    ids=["flat", "within the bound", "one step late", "falls after the warm-up", "leaks",
         "descriptors come and go", "descriptors leak", "both leak"],
)  # fmt: skip
def test_what_grows_is_told(mib, descriptors, trouble, judged):
    assert judged(mib, descriptors)["trouble"] == trouble


def test_the_slope_is_in_mib_per_hour(judged):
    assert judged(100 + 40 * HOURS, FLAT)["mib_per_hour"] == pytest.approx(40)


def test_a_process_that_is_gone_before_the_end_is_told(judged):
    assert "did not live" in judged(100 + NOISE, FLAT, expected=400)["trouble"]
