"""The toys: their answers, their ends, their states."""

import numpy as np
import pytest

from tianji.env import Continuous, Discrete, Env, Restorable, make_env
from tianji.envs.toy import Chain, Identity, Pair, Recall, Target
from tianji.errors import Refusal
from tianji.testing import check_env

TOYS = {
    "identity": lambda n: Identity(n, n=3, length=5),
    "identity of one step": lambda n: Identity(n, length=1),
    "identity, continuous": lambda n: Identity(n, length=5, continuous=True),
    "chain": lambda n: Chain(n, n=4, limit=9),
    "chain from anywhere": lambda n: Chain(n, n=4, limit=9, anywhere=True),
    "target": lambda n: Target(n, every=3),
    "recall": lambda n: Recall(n, n=3, delay=2),
    "pair": lambda n: Pair(n, n=3, length=5),
    "pair, each with its own reward": lambda n: Pair(n, n=3, length=5, own_rewards=True),
}


@pytest.mark.parametrize("name", TOYS)
def test_every_toy_keeps_the_promises_of_an_env(name: str) -> None:
    check_env(TOYS[name], steps=200)


@pytest.mark.parametrize(
    "id", ["toy/Identity", "toy/Chain", "toy/Pair", "toy/Recall", "toy/Target"]
)
def test_every_toy_is_made_by_its_name_and_restorable(id: str) -> None:
    env = make_env(id, 2, {})
    assert env.spec.id == id
    assert isinstance(env, Restorable)


def play(env: Env, choose, steps: int) -> tuple[float, int]:
    """Total reward and count of valid steps under a rule from observation to action."""
    observation, total, count = env.reset(0), 0.0, 0
    for _ in range(steps):
        step = env.step(choose(observation["obs"]))
        observation, total = step.observation, total + float(step.reward.sum())
        count += int(step.valid.sum())
    return total, count


def test_the_right_answer_to_identity_earns_its_optimal_return() -> None:
    env = Identity(3, n=4, length=5)
    total, count = play(env, lambda obs: obs.argmax(1), 12)  # two episodes of 5 steps and a reset
    assert count == 30
    assert total == 3 * 2 * env.optimal_return


def test_a_wrong_answer_to_identity_earns_nothing() -> None:
    total, _ = play(Identity(3, n=4), lambda obs: (obs.argmax(1) + 1) % 4, 20)
    assert total == 0


def test_the_continuous_identity_earns_minus_the_squared_distance() -> None:
    env = Identity(3, length=5, continuous=True)
    assert env.spec.action == Continuous((-1.0,), (1.0,), (1,))
    assert play(env, lambda obs: obs, 12)[0] == env.optimal_return == 0
    total, count = play(env, lambda obs: np.clip(obs, -1, 1) * 0 + 9, 6)
    observation = Identity(3, length=5, continuous=True)
    xs, obs = [], observation.reset(0)["obs"]
    for _ in range(5):
        xs.append(obs)
        obs = observation.step(np.full((3, 1), 9, np.float32)).observation["obs"]
    assert count == 15
    assert total == pytest.approx(-np.square(1 - np.array(xs)).sum(), rel=1e-5)  # 9 is clipped


def test_identity_terminates_and_is_never_truncated() -> None:
    env = Identity(2, length=3)
    env.reset(0)
    steps = [env.step(np.zeros(2, np.int64)) for _ in range(8)]
    assert [bool(s.terminated[0]) for s in steps] == [False, False, True, False] * 2
    assert [bool(s.valid[0]) for s in steps] == [True, True, True, False] * 2
    assert not any(s.truncated.any() for s in steps)


def test_the_chain_pays_at_its_right_end_and_terminates_there() -> None:
    env = Chain(1, n=3, limit=10)
    env.reset(0)
    steps = [env.step(np.array([a])) for a in (0, 1, 1, 1, 1)]
    assert [int(s.observation["obs"][0].argmax()) for s in steps] == [0, 1, 2, 0, 1]
    assert [float(s.reward[0]) for s in steps] == [0, 0, 1, 0, 0]
    assert [bool(s.terminated[0]) for s in steps] == [False, False, True, False, False]
    assert [bool(s.valid[0]) for s in steps] == [True, True, True, False, True]


def test_the_chain_is_truncated_at_its_limit() -> None:
    env = Chain(1, n=3, limit=2)
    env.reset(0)
    steps = [env.step(np.array([0])) for _ in range(3)]
    assert [bool(s.truncated[0]) for s in steps] == [False, True, False]


def test_arriving_at_the_limit_counts_as_termination() -> None:
    env = Chain(1, n=3, limit=2)
    env.reset(0)
    env.step(np.array([1]))
    step = env.step(np.array([1]))
    assert step.terminated[0]
    assert not step.truncated[0]


def test_the_chains_optimal_values_solve_the_bellman_equation() -> None:
    n, gamma = 6, 0.9
    values = np.zeros(n)
    for _ in range(100):
        for s in range(n - 1):
            right = float(s + 1 == n - 1) + gamma * values[s + 1]
            values[s] = max(right, gamma * values[max(s - 1, 0)])
    np.testing.assert_allclose(Chain(1, n=n).optimal_values(gamma), values)


def test_the_chain_from_anywhere_begins_everywhere_but_at_its_end() -> None:
    begins = Chain(200, n=4, anywhere=True).reset(0)["obs"].argmax(1)
    assert set(begins) == {0, 1, 2}


def test_target_is_truncated_and_never_terminates() -> None:
    env = Target(2, every=2)
    env.reset(0)
    steps = [env.step(np.zeros(2, np.int64)) for _ in range(6)]
    assert [bool(s.truncated[0]) for s in steps] == [False, True, False] * 2
    assert [float(s.reward[0]) for s in steps] == [1, 1, 0] * 2
    assert not any(s.terminated.any() for s in steps)
    assert env.spec.action == Discrete(2)
    np.testing.assert_allclose(env.optimal_values(0.9), [10.0])


@pytest.mark.parametrize(("id", "kwargs"), [("toy/Chain", {"n": 1}), ("toy/Target", {"every": 0})])
def test_a_toy_that_cannot_be_played_is_refused(id: str, kwargs: dict[str, int]) -> None:
    with pytest.raises(Refusal, match="or more"):
        make_env(id, 1, kwargs)


def test_options_that_a_toy_does_not_have_are_refused() -> None:
    with pytest.raises(Refusal, match=r"env\.kwargs"):
        make_env("toy/Chain", 1, {"length": 3})


def test_a_toy_has_no_picture_and_says_so() -> None:
    with pytest.raises(Refusal, match="no picture"):
        Target(1).render()


def test_recall_shows_its_symbol_once_and_asks_for_it_at_the_end() -> None:
    env = Recall(5, n=3, delay=2)
    first = env.reset(0)["obs"]
    symbol = first.argmax(1)
    assert (first.sum(1) == 1).all()
    assert (symbol < 3).all()
    for clock in range(1, 4):
        step = env.step(symbol)
        assert not step.observation["obs"][:, :3].any()
        assert (step.observation["obs"][:, 3] == (clock == 3)).all()
        assert not step.reward.any()
        assert not step.terminated.any()
    step = env.step(symbol)
    assert (step.reward == env.optimal_return).all()
    assert step.terminated.all()


@pytest.mark.parametrize("own_rewards", [False, True])
def test_a_pair_that_names_its_symbols_earns_its_optimal_return(own_rewards: bool) -> None:
    env = Pair(3, n=4, length=6, own_rewards=own_rewards)
    observation, total, acting = env.reset(0), 0.0, []
    for _ in range(6):
        acting.append(observation["alive"].all(0).tolist())
        action = np.where(observation["alive"], observation["obs"].argmax(-1), 0)
        assert np.take_along_axis(observation["mask"], action[..., None], -1).all()
        step = env.step(action)
        observation, total = step.observation, total + step.reward.reshape(3, -1).mean(1)
    assert acting == [[True, True]] * 3 + [[True, False]] * 3
    np.testing.assert_allclose(total, env.optimal_return)
    assert step.terminated.all()


def test_a_pair_refuses_what_is_not_legal() -> None:
    env = Pair(1, n=3)
    mask = env.reset(0)["mask"]
    with pytest.raises(ValueError, match="not legal"):
        env.step(mask.argmin(-1))
