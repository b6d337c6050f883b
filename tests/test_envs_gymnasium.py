"""Gymnasium envs behind our template: spaces, ends, seeds, refusals, states, pictures."""

import sys
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from tianji.env import Continuous, Discrete, MultiDiscrete, Restorable, make_env
from tianji.envs.gymnasium import GymnasiumEnv, known_ids, make_gymnasium_env
from tianji.errors import Refusal
from tianji.testing import check_env

BOX = spaces.Box(-1, 1, (2,), np.float32)


class Given(gymnasium.Env[Any, Any]):
    """Observes a sample of its space, or what is given; remembers the actions it gets."""

    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(
        self,
        observation: spaces.Space[Any] = BOX,
        action: spaces.Space[Any] = spaces.Discrete(2),  # noqa: B008
        value: Any = None,
    ) -> None:
        self.observation_space, self.action_space, self.value = observation, action, value
        self.actions: list[Any] = []

    def _see(self) -> Any:
        return self.observation_space.sample() if self.value is None else self.value

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        return self._see(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.actions.append(action)
        return self._see(), 1.0, False, False, {}


class Walk(gymnasium.Env[Any, Any]):
    """Action 1 terminates, action 2 terminates and truncates; else truncated after three steps.

    An observation tells the episode's random name and the step within it.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.name, self.at = float(self.np_random.integers(1000)), 0
        return np.array([self.name, self.at]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.at += 1
        observation = np.array([self.name, self.at])
        return observation, self.at * 1.0, action > 0, action == 2 or self.at == 3, {}


class RaisingReset(Given):
    def reset(self, **_: Any) -> Any:
        raise ZeroDivisionError("no beginning")


class RaisingConstructor(Given):
    def __init__(self) -> None:
        raise OSError("no such level")


class Gray(Given):
    """Draws what is no picture."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__()
        self.render_mode = render_mode

    def render(self) -> Any:
        return np.zeros((4, 4), np.uint8)


def walks(says: Any) -> Callable[..., VectorEnv[Any, Any, Any]]:
    def make(num_envs: int) -> VectorEnv[Any, Any, Any]:
        does = AutoresetMode.NEXT_STEP if says in (None, "Sometimes") else says
        vector: Any = SyncVectorEnv([Walk] * num_envs, autoreset_mode=does)
        vector.metadata = {} if says is None else {"autoreset_mode": says}
        return vector

    return make


def native_of(**options: Any) -> Callable[..., VectorEnv[Any, Any, Any]]:
    return lambda num_envs: SyncVectorEnv([lambda: Given(**options)] * num_envs)


gymnasium.register("test/Given-v0", Given)
gymnasium.register("test/Walk-v0", Walk)
gymnasium.register("test/RaisingReset-v0", RaisingReset)
gymnasium.register("test/RaisingConstructor-v0", RaisingConstructor)
gymnasium.register("test/Gray-v0", Gray)
gymnasium.register("test/Nowhere-v0", "surely_not_installed.envs:Nowhere")
gymnasium.register("test/Timed-v0", Given, max_episode_steps=3)
for name, mode in (("Next", "NextStep"), ("Same", "SameStep"), ("Disabled", "Disabled")):
    for kind, value in (("", AutoresetMode(mode)), ("Text", mode)):
        gymnasium.register(f"test/{name}{kind}-v0", Walk, vector_entry_point=walks(value))
gymnasium.register("test/Unknown-v0", Walk, vector_entry_point=walks("Sometimes"))
gymnasium.register("test/Missing-v0", Walk, vector_entry_point=walks(None))
gymnasium.register(
    "test/NativeDiscrete-v0", vector_entry_point=native_of(observation=spaces.Discrete(3))
)
gymnasium.register(
    "test/NativeDict-v0",
    vector_entry_point=native_of(observation=spaces.Dict(a=BOX, b=spaces.Discrete(3))),
)


class Doubled(SyncVectorEnv[Any, Any]):
    """Returns twice the columns that it declares."""

    def reset(self, **options: Any) -> Any:
        observation, info = super().reset(**options)
        return np.concatenate([observation, observation], axis=1), info


class Clearing(SyncVectorEnv[Any, Any]):
    """Returns its own arrays, and clears them where it resets."""

    def __init__(self, num_envs: int) -> None:
        super().__init__([Walk] * num_envs, autoreset_mode=AutoresetMode.DISABLED)

    def reset(self, *, options: Any = None, **rest: Any) -> Any:
        if options is not None:
            self._rewards[options["reset_mask"]] = 0
        return super().reset(options=options, **rest)

    def step(self, actions: Any) -> Any:
        observation, *_, info = super().step(actions)
        return observation, self._rewards, self._terminations, self._truncations, info


gymnasium.register("test/Clearing-v0", vector_entry_point=Clearing)
gymnasium.register("test/NativeDoubled-v0", vector_entry_point=lambda num_envs: Doubled([Given]))


def given(num_envs: int = 3, **kwargs: Any) -> GymnasiumEnv:
    return make_gymnasium_env("test/Given-v0", num_envs, kwargs)


def received(env: GymnasiumEnv, of: int = 0) -> list[Any]:
    """The actions that a single env got."""
    return env._singles[of].unwrapped.actions  # type: ignore[attr-defined]


def test_gymnasium_ids_are_known() -> None:
    assert {"CartPole-v1", "Pendulum-v1", "test/Given-v0"} <= known_ids()


def test_cartpole_uses_its_own_vector_implementation() -> None:
    env = make_gymnasium_env("CartPole-v1", 3, {})
    assert type(env._vector).__name__ == "CartPoleVectorEnv"
    assert env.spec.action == Discrete(2)
    assert env.spec.observation["obs"].shape == (4,)
    assert env.spec.max_episode_steps == 500


def test_an_id_with_its_module_is_imported() -> None:
    env = make_env("gymnasium.envs:CartPole-v1", 2, {})
    assert env.reset(0)["obs"].shape == (2, 4)


@pytest.mark.parametrize(
    ("space", "shape", "dtype"),
    [
        (spaces.Box(-1, 1, (2, 3), np.float64), (2, 3), np.float32),
        (spaces.Box(0, 9, (2,), np.int32), (2,), np.float32),
        (spaces.Box(0, 255, (4, 4, 3), np.uint8), (4, 4, 3), np.uint8),
        (spaces.Discrete(3, start=2), (3,), np.float32),
        (spaces.MultiDiscrete([2, 3]), (5,), np.float32),
        (spaces.MultiBinary(4), (4,), np.float32),
        (spaces.Dict(a=BOX, b=spaces.Discrete(3)), (5,), np.float32),
        (spaces.Dict(a=spaces.Box(0, 255, (2, 2), np.uint8)), (4,), np.float32),
        (spaces.Tuple((BOX, spaces.MultiBinary(2))), (4,), np.float32),
    ],
    ids=str,
)
def test_observations_keep_a_box_and_flatten_the_rest(
    space: spaces.Space[Any], shape: tuple[int, ...], dtype: Any
) -> None:
    value = space.sample()
    env = given(observation=space, value=value)
    leaf = env.spec.observation["obs"]
    assert (leaf.shape, leaf.dtype) == (shape, dtype)
    flat = value if isinstance(space, spaces.Box) else spaces.flatten(space, value)
    for observation in (env.reset(0), env.step(np.zeros(3, np.int64)).observation):
        assert observation["obs"].shape == (3, *shape)
        assert observation["obs"].dtype == dtype
        np.testing.assert_array_equal(observation["obs"], [np.asarray(flat, dtype)] * 3)


@pytest.mark.parametrize("id", ["test/NativeDiscrete-v0", "test/NativeDict-v0"])
def test_observations_of_a_native_vector_are_flattened_too(id: str) -> None:
    env = make_gymnasium_env(id, 4, {})
    (size,) = env.spec.observation["obs"].shape
    for observation in (env.reset(0), env.step(np.zeros(4, np.int64)).observation):
        assert observation["obs"].shape == (4, size)
        assert observation["obs"].dtype == np.float32
        np.testing.assert_array_equal(observation["obs"][:, -3:].sum(1), np.ones(4))


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(5),
        spaces.Sequence(BOX),
        spaces.Graph(BOX, None),
        spaces.Dict(a=BOX, b=spaces.Text(5)),
        spaces.Tuple((BOX, spaces.Sequence(BOX))),
    ],
    ids=lambda space: type(space).__name__,
)
def test_an_observation_space_without_a_fixed_shape_is_refused(space: spaces.Space[Any]) -> None:
    with pytest.raises(Refusal, match=r"observes a (Text|Sequence|Graph) space.*Wrap the env"):
        given(observation=space)


def test_discrete_actions_begin_where_the_space_does() -> None:
    env = given(2, action=spaces.Discrete(3, start=-1))
    assert env.spec.action == Discrete(3)
    env.reset(0)
    env.step(np.array([0, 2]))
    assert (received(env, 0), received(env, 1)) == ([-1], [1])


def test_multidiscrete_actions_begin_where_the_space_does() -> None:
    env = given(2, action=spaces.MultiDiscrete([2, 3], start=[10, 20], dtype=np.int32))
    assert env.spec.action == MultiDiscrete((2, 3))
    env.reset(0)
    env.step(np.array([[0, 2], [1, 1]]))
    np.testing.assert_array_equal([received(env, 0), received(env, 1)], [[[10, 22]], [[11, 21]]])
    assert received(env)[0].dtype == np.int32


def test_continuous_actions_are_clipped_and_get_the_envs_shape() -> None:
    low, high = np.array([[-1, -2], [-3, -4]]), np.array([[1, 2], [3, np.inf]])
    env = given(1, action=spaces.Box(low.astype(np.float64), high, dtype=np.float64))
    assert env.spec.action == Continuous((-1, -2, -3, -4), (1, 2, 3, float("inf")), (2, 2))
    env.reset(0)
    action = np.array([[-5, 5, 0.5, 99]], np.float32)
    env.step(action)
    np.testing.assert_array_equal(received(env)[0], [[-1, 2], [0.5, 99]])
    assert received(env)[0].dtype == np.float64
    np.testing.assert_array_equal(action, np.array([[-5, 5, 0.5, 99]], np.float32))


def test_a_single_env_may_keep_its_action() -> None:
    env = given(1, action=BOX)
    env.reset(0)
    buffer = np.zeros((1, 2), np.float32)
    for x in (0.25, 0.5):
        buffer[:] = x
        env.step(buffer)
    np.testing.assert_array_equal(received(env), [[0.25, 0.25], [0.5, 0.5]])


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(0, 5, (2,), np.int32),
        spaces.MultiDiscrete([[2, 2], [2, 2]]),
        spaces.MultiBinary(2),
        spaces.Dict(a=spaces.Discrete(2)),
    ],
    ids=str,
)
def test_an_action_space_that_no_policy_chooses_in_is_refused(space: spaces.Space[Any]) -> None:
    with pytest.raises(Refusal, match=r"(?s)test/Given-v0 acts in .*Wrap the env"):
        given(action=space)


def script(num_envs: int, steps: int) -> Any:
    return np.random.default_rng(3).choice(3, size=(steps, num_envs), p=[0.8, 0.1, 0.1])


def by_hand(seed: int, actions: Any, next_step: bool) -> list[tuple[Any, ...]]:
    """One Walk stepped as its mode says: (observation, reward, terminated, truncated, valid)."""
    env, rows, ended = Walk(), [], False
    env.reset(seed=seed)
    for action in actions:
        if ended and next_step:
            rows.append((env.reset()[0], 0.0, False, False, False))
            ended = False
            continue
        observation, reward, terminated, truncated, _ = env.step(action)
        truncated = truncated and not terminated
        ended = bool(terminated or truncated)
        if ended and not next_step:
            observation = env.reset()[0]
        rows.append((observation, reward, terminated, truncated, next_step or not truncated))
    return rows


@pytest.mark.parametrize(
    ("id", "next_step"),
    [
        ("test/Walk-v0", True),
        ("test/Next-v0", True),
        ("test/NextText-v0", True),
        ("test/Same-v0", False),
        ("test/SameText-v0", False),
        ("test/Disabled-v0", False),
        ("test/DisabledText-v0", False),
        ("test/Clearing-v0", False),
    ],
)
def test_every_autoreset_mode_gives_what_single_envs_give(id: str, next_step: bool) -> None:
    num_envs, seed = 3, 11
    env, actions = make_gymnasium_env(id, num_envs, {}), script(num_envs, 60)
    env.reset(seed)
    got = [[np.array(a) for a in (s.observation["obs"], *s[1:5])] for s in map(env.step, actions)]
    if id == "test/Walk-v0":
        seeds = [int(x) for x in np.random.SeedSequence(seed).generate_state(num_envs)]
    else:
        seeds = [seed + i for i in range(num_envs)]  # what SyncVectorEnv makes of an int
    ends = 0
    for i in range(num_envs):
        expected = by_hand(seeds[i], actions[:, i], next_step)
        for t, row in enumerate(expected):
            for ours, theirs in zip(got[t], row, strict=True):
                np.testing.assert_array_equal(ours[i], theirs, err_msg=f"env {i}, step {t}")
            ends += int(row[2] or row[3])
    assert ends > 20


def test_a_step_both_terminated_and_truncated_counts_as_terminated() -> None:
    for id in ("test/Walk-v0", "test/Same-v0", "test/Disabled-v0"):
        env = make_gymnasium_env(id, 1, {})
        env.reset(0)
        step = env.step(np.array([2]))
        assert (step.terminated[0], step.truncated[0], step.valid[0]) == (True, False, True), id


@pytest.mark.parametrize("id", ["test/Unknown-v0", "test/Missing-v0"])
def test_an_unknown_autoreset_mode_is_refused(id: str) -> None:
    with pytest.raises(Refusal, match=r"bootstrapping would be wrong.*Set the metadata"):
        make_gymnasium_env(id, 2, {})


def test_the_time_limit_truncates() -> None:
    env = make_gymnasium_env("test/Timed-v0", 2, {})
    env.reset(0)
    truncated = [bool(env.step(np.zeros(2, np.int64)).truncated[0]) for _ in range(5)]
    assert truncated == [False, False, True, False, False]
    assert env.spec.max_episode_steps == 3
    longer = make_gymnasium_env("test/Timed-v0", 2, {"max_episode_steps": 9})
    assert longer.spec.max_episode_steps == 9


def test_a_reset_forgets_the_ends_before_it() -> None:
    env = make_gymnasium_env("test/Walk-v0", 1, {})
    env.reset(0)
    env.step(np.array([1]))
    env.reset(0)
    assert env.step(np.array([0])).valid[0]


def test_envs_of_one_seed_differ_from_each_other() -> None:
    observation = make_gymnasium_env("Pendulum-v1", 4, {}).reset(0)["obs"]
    assert len(np.unique(observation[:, 0])) == 4


@pytest.mark.parametrize("id", ["test/Walk-v0", "test/Next-v0", "MountainCar-v0", "Taxi-v4"])
def test_single_and_native_envs_pass_the_checker(id: str) -> None:
    check_env(lambda num_envs: make_env(id, num_envs, {}), steps=210)


def test_a_first_observation_of_the_wrong_shape_is_refused() -> None:
    env = given(observation=BOX, value=np.zeros(5, np.float32))
    with pytest.raises(Refusal, match=r"declares .*float32 \(2,\).*float32 \(5,\).*Correct its"):
        env.reset(0)


def test_a_first_observation_of_the_wrong_dtype_is_refused() -> None:
    env = given(observation=spaces.Box(0, 255, (2,), np.uint8), value=np.zeros(2, np.float32))
    with pytest.raises(Refusal, match=r"uint8 \(2,\).*float32 \(2,\)"):
        env.reset(0)


def test_a_native_vector_of_the_wrong_shape_is_refused() -> None:
    env = make_gymnasium_env("test/NativeDoubled-v0", 1, {})
    with pytest.raises(Refusal, match=r"float32 \(1, 2\).*float32 \(1, 4\)"):
        env.reset(0)


def test_a_reset_that_raises_is_refused() -> None:
    env = make_gymnasium_env("test/RaisingReset-v0", 2, {})
    message = r"test/RaisingReset-v0.*so no step can be made: ZeroDivisionError: no beginning"
    with pytest.raises(Refusal, match=message):
        env.reset(0)


def test_a_constructor_that_raises_is_refused() -> None:
    message = r"test/RaisingConstructor-v0.*so no step can be made: OSError: no such level"
    with pytest.raises(Refusal, match=message):
        make_gymnasium_env("test/RaisingConstructor-v0", 2, {})


@pytest.mark.parametrize("id", ["test/Given-v0", "CartPole-v1"])
def test_kwargs_that_the_env_does_not_take_are_refused(id: str) -> None:
    with pytest.raises(Refusal, match=r"env\.kwargs = .*gravitation.*Correct env\.kwargs"):
        make_gymnasium_env(id, 2, {"gravitation": 3})


def test_an_id_whose_version_does_not_exist_is_refused() -> None:
    with pytest.raises(Refusal, match="CartPole-v99"):
        make_gymnasium_env("CartPole-v99", 2, {})


def test_a_package_that_is_missing_is_named() -> None:
    with pytest.raises(Refusal, match="pip install surely_not_installed"):
        make_gymnasium_env("test/Nowhere-v0", 2, {})


def without(monkeypatch: pytest.MonkeyPatch, package: str, users: str) -> None:
    """As if the package were not installed, and its users were not imported yet."""
    for name in [name for name in sys.modules if name.startswith(users)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)


def test_a_missing_box2d_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "Box2D", "gymnasium.envs.box2d")
    with pytest.raises(Refusal, match=r"pip install 'tianji\[box2d\]'"):
        make_gymnasium_env("LunarLander-v3", 2, {})


def test_a_jax_env_without_jax_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "jax", "gymnasium.envs.phys2d")
    with pytest.raises(Refusal, match="pip install jax"):
        make_gymnasium_env("phys2d/CartPole-v1", 2, {})


def test_cartpole_goes_on_exactly_where_it_was() -> None:
    env = make_env("CartPole-v1", 4, {})
    assert isinstance(env, Restorable)
    kwargs = {"max_episode_steps": 15}  # so that both kinds of end occur
    check_env(lambda num_envs: make_env("CartPole-v1", num_envs, kwargs), steps=100)


def test_the_state_of_another_number_of_envs_is_refused() -> None:
    four, two = make_env("CartPole-v1", 4, {}), make_env("CartPole-v1", 2, {})
    assert isinstance(four, Restorable)
    assert isinstance(two, Restorable)
    four.reset(0)  # type: ignore[attr-defined]
    with pytest.raises(Refusal, match="Set num_envs to 4"):
        two.load_state(four.state())


@pytest.mark.parametrize("id", ["Pendulum-v1", "test/Next-v0"])
def test_an_env_that_cannot_be_restored_exactly_offers_no_state(id: str) -> None:
    assert not isinstance(make_env(id, 2, {}), Restorable)


def test_a_rendering_env_draws_its_first_env() -> None:
    pytest.importorskip("pygame", reason="pictures need the video extra")
    env = make_env("CartPole-v1", 2, {}, render=True)
    env.reset(0)
    picture = env.render()
    assert picture.ndim == 3
    assert picture.shape[2] == 3
    assert picture.dtype == np.uint8
    assert not isinstance(env, Restorable)
    env.close()


def test_rendering_without_pygame_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    env = make_env("CartPole-v1", 1, {}, render=True)
    monkeypatch.setitem(sys.modules, "pygame", None)
    with pytest.raises(Refusal, match=r"pip install 'tianji\[video\]'"):
        env.reset(0)


@pytest.mark.parametrize("id", ["test/Given-v0", "test/Walk-v0"])
def test_an_env_that_cannot_render_is_refused(id: str) -> None:
    with pytest.raises(Refusal, match="no render mode rgb_array"):
        make_env(id, 1, {}, render=True)


def test_what_is_no_picture_is_refused() -> None:
    env = make_env("test/Gray-v0", 1, {}, render=True)
    with pytest.raises(Refusal, match=r"uint8 \(4, 4\)"):
        env.reset(0)


def test_an_env_made_without_pictures_says_so() -> None:
    env = make_env("CartPole-v1", 1, {})
    with pytest.raises(Refusal, match="render=True"):
        env.render()
