"""Every shipped config runs with engine serial and with engine local."""

import dataclasses
import importlib.util

import pytest

import tianji
from tianji.config import load_config, shipped_configs

NAMES = [path.stem for path in shipped_configs()]
NEEDS = {"smax": "jaxmarl"}
"""what is not installed for the tests, by a word of a config's name"""


pytestmark = pytest.mark.usefixtures("one_server")


def smaller(name: str) -> list[str]:
    """Overrides that let a config make its first updates at once."""
    for word, package in NEEDS.items():
        if word in name and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install 'tianji[{word}]'")
    config = load_config(name)
    has = {f.name for f in dataclasses.fields(config.algorithm)}
    overrides = ["stop.updates=3", "scale.envs_per_actor=2", "scale.device=cpu", "eval.every=0"]
    if "warmup" in has:
        overrides += ["algorithm.warmup=512", "algorithm.capacity=4096"]
    for key, most in (("batch_size", 32), ("minibatches", 2), ("n_step", 3), ("epochs", 2)):
        if key in has and getattr(config.algorithm, key) > most:
            overrides.append(f"algorithm.{key}={most}")
    if config.scale.rollout_length > 16:
        overrides.append("scale.rollout_length=16")
    return overrides


def first_of_each_algorithm() -> set[str]:
    """A config for each algorithm."""
    names = {load_config(name).algorithm.name: name for name in reversed(NAMES)}
    return set(names.values())


def groups(name: str) -> bool:
    return load_config(name).scale.groups > 1


@pytest.mark.parametrize("name", [name for name in NAMES if not groups(name)])
def test_a_config_runs_in_one_process(name, tmp_path):
    overrides = [*smaller(name), "scale.engine=serial", "scale.cores=1"]
    if load_config(name).scale.relax == "apex":
        overrides.append("scale.relax=tianji")  # its learner never waits: that needs processes
    result = tianji.train(name, overrides, runs=tmp_path)
    assert result.status == "done"
    assert result.updates >= 3


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in first_of_each_algorithm() else pytest.mark.slow)
        for name in NAMES
    ],
)
def test_a_config_runs_in_processes(name, tmp_path):
    result = tianji.train(
        name, [*smaller(name), "scale.engine=local", "scale.cores=1"], runs=tmp_path
    )
    assert result.status == "done"
    assert result.updates >= 3
    assert "buffer" in result.time or "worker" in result.time
