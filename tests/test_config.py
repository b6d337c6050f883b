"""Configs: what is accepted, where values come from, and what each refusal says."""

import json

import pytest

from tianji.config import load_config, shipped_configs
from tianji.errors import Refusal

BASE = {
    "env": {"id": "CartPole-v1"},
    "algorithm": {"name": "ppo"},
    "stop": {"steps": 100},
}


def config(*overrides):
    return load_config(BASE, overrides)


def refusal(*overrides, base=BASE):
    with pytest.raises(Refusal) as caught:
        load_config(base, overrides)
    return str(caught.value)


def test_defaults_fill_what_the_file_leaves_out():
    c = config()
    assert c.scale.engine == "serial"
    assert c.algorithm.gamma == 0.99
    assert c.seed == 0


def test_overrides_win_over_the_file_and_know_it():
    c = config("algorithm.gamma=0.5", "network.hidden=[8, 8]", "seed=3", "stop.return=10")
    assert (c.algorithm.gamma, c.network.hidden, c.seed, c.stop.return_) == (0.5, (8, 8), 3, 10.0)
    origin = {key: where for key, _, where, _ in c.rows()}
    assert origin["algorithm.gamma"] == "command line"
    assert origin["env.id"] == "given"
    assert origin["algorithm.clip"] == "default"


def test_an_override_inside_a_table_knows_where_it_came_from():
    c = config("env.kwargs.max_episode_steps=9")
    assert c.env.kwargs == {"max_episode_steps": 9}
    assert {key: where for key, _, where, _ in c.rows()}["env.kwargs"] == "command line"


def test_whole_numbers_may_be_written_as_floats():
    assert config("stop.steps=1e6").stop.steps == 1_000_000
    assert isinstance(config("stop.steps=1e6").stop.steps, int)


def test_one_override_may_be_a_text():
    assert load_config(BASE, "seed=4").seed == 4


def test_a_word_needs_no_quotes_on_the_command_line():
    assert config("network.activation=relu").network.activation == "relu"
    assert config("env.id=Acrobot-v1").env.id == "Acrobot-v1"


def test_every_key_has_a_meaning():
    for name in ("ppo", "dqn"):
        for key, _, _, meaning in config(f"algorithm.name={name}").rows():
            assert meaning, f"{key} has no line that says what it is"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algorithm.gama=0.9", ["algorithm.gama", "0.9", 'Did you mean "algorithm.gamma"?']),
        ("algoritm.gamma=0.9", ["algoritm", 'Did you mean "algorithm"?']),
        ("scale.actor=2", ['Did you mean "scale.actors"?']),
        ("algorithm.gamma=high", ["algorithm.gamma", "'high'", "must be a number"]),
        ("scale.actors=many", ["scale.actors", "whole number", '"auto"']),
        ("algorithm.epochs=2.5", ["algorithm.epochs", "2.5", "whole number"]),
        ("algorithm.epochs=true", ["algorithm.epochs", "whole number"]),
        ("algorithm.normalise_reward=1", ["true or false"]),
        ("algorithm.gamma=1.5", ["1.5", "at least 0 and at most 1"]),
        ("algorithm.learning_rate=0.0", ["more than 0"]),
        ("scale.actors=0", ["at least 1"]),
        ("seed=-1", ["seed", "at least 0"]),
        ("seed=one", ["seed", "whole number"]),
        ("network.activation=thanh", ['Did you mean "tanh"?', "tanh, relu"]),
        ("network.hidden=64", ["network.hidden", "a list"]),
        ("network.hidden=[64, 0]", ["network.hidden[1]", "at least 1"]),
        ("env.id=3", ["env.id", "text in quotes"]),
        ("env.kwargs=3", ["env.kwargs", "a table"]),
        ("algorithm.name=pppo", ['Did you mean "ppo"?']),
        ("scale.engine=loca", ["scale.engine", "serial"]),
        ("scale.learners=2", ["scale.learners = 2", 'scale.engine = "local"']),
        ("scale.learners=65", ["scale.learners = 65", "at most 64"]),
        ("env=3", ["env = 3", "[env]"]),
        ("algorithm.learning_rate=inf", ["more than 0"]),
        ("stop.return=nan", ["not a number"]),
        ("scale.groups=2", ["scale.groups = 2", 'scale.engine = "local"']),
        ("join.graph=line", ["join.graph", "exponential"]),
        ("join.patience=1.5", ["join.patience", "whole number"]),
        ("env.imports=foo", ['["a", "b"]']),
        ("scale.cores=4096", ["4096", "cores"]),
        ("nonsense", ["key=value"]),
        ("env.imports=[\"no_such_module_here\"]", ["no_such_module_here", "PYTHONPATH"]),
    ],
)  # fmt: skip
def test_bad_values_are_refused_with_key_value_and_remedy(override, words):
    message = refusal(override)
    for word in words:
        assert word in message, message


def test_a_run_without_an_end_is_refused():
    assert "never end" in refusal(base={**BASE, "stop": {}})


def test_a_config_without_an_algorithm_is_refused():
    assert "algorithm.name" in refusal(base={**BASE, "algorithm": {}})


def test_a_config_without_an_env_is_refused():
    assert "env.id is not set" in refusal(base={**BASE, "env": {}})


def test_a_file_that_is_missing_or_no_toml_is_refused(tmp_path):
    with pytest.raises(Refusal, match=r"no config file.*ppo_cartpole"):
        load_config(tmp_path / "ppo_cartpol.toml")
    bad = tmp_path / "bad.toml"
    bad.write_text("seed = = 3")
    with pytest.raises(Refusal, match="not TOML"):
        load_config(bad)


def test_a_config_cannot_execute_code(tmp_path):
    for attempt in ('seed = __import__("os").getpid()', "[env]\nid = !!python/object:os.system"):
        path = tmp_path / "code.toml"
        path.write_text(attempt)
        with pytest.raises(Refusal):
            load_config(path)


def test_the_resolved_config_resolves_to_itself():
    first = config("scale.actors=2", "stop.return=3")
    assert load_config(json.loads(json.dumps(first.tree()))).tree() == first.tree()


def test_identity_holds_what_is_learnt_and_not_when_it_ends():
    first = config()
    assert config("stop.steps=7", "checkpoint.keep=1").identity() == first.identity()
    assert config("seed=1").identity() != first.identity()
    assert config("algorithm.gamma=0.9").identity() != first.identity()


@pytest.mark.parametrize("path", shipped_configs(), ids=lambda p: p.stem)
def test_shipped_configs_load_and_say_what_to_expect(path):
    loaded = load_config(path)
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert any(line.startswith(f"# Run:    tianji train configs/{path.name}") for line in header)
    assert any(line.startswith("# Expect:") and len(line) > 20 for line in header)
    assert load_config(path.stem).tree() == loaded.tree()
