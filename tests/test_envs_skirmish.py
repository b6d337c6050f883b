"""The built-in battle: SMAC's sizes and layout, who hits whom, rewards, ends."""

import numpy as np
import pytest

from tianji.env import Discrete, Restorable, make_env
from tianji.envs.skirmish import APART, SIDE, Skirmish
from tianji.errors import Refusal
from tianji.testing import check_env

SIZES = {  # agents, obs, state, actions, limit, as StarCraft2Env tells them
    "3m": (3, 30, 48, 9, 60),
    "8m": (8, 80, 168, 14, 120),
    "2s3z": (5, 80, 120, 11, 120),
    "5m_vs_6m": (5, 55, 98, 12, 70),
}
NOTHING, STOP, NORTH, SOUTH, EAST, WEST, FIRST = range(7)


def placed(name="3m", apart=4.0, num_envs=1):
    """Teams in two columns that face each other, all units in full health."""
    env = Skirmish(num_envs, name)
    env.reset(0)
    state = env.state()
    A, units = len(env.spec.agents), state["place"].shape[1]
    state["place"][:, :A, 0] = SIDE / 2 - apart / 2
    state["place"][:, A:, 0] = SIDE / 2 + apart / 2
    for i in range(units):
        state["place"][:, i, 1] = SIDE / 2 + (i if i < A else i - A) * 0.5
    env.load_state(state)
    return env, env._observe()


def random_legal(mask, rng):
    return np.where(mask, rng.random(mask.shape), -1.0).argmax(axis=-1)


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_those_of_smac(name):
    env = make_env(f"skirmish/{name}", 2, {})
    agents, obs, state, actions, limit = SIZES[name]
    layout = {k: v.shape for k, v in env.spec.observation.items()}
    assert layout == {
        "obs": (agents, obs), "state": (state,), "mask": (agents, actions), "alive": (agents,)
    }  # fmt: skip
    assert env.spec.action == Discrete(actions)
    assert (len(env.spec.agents), env.spec.max_episode_steps) == (agents, limit)
    assert env.spec.id == f"skirmish/{name}"


@pytest.mark.parametrize("name", SIZES)
def test_the_env_keeps_its_promises(name):
    assert isinstance(Skirmish(1, name), Restorable)
    check_env(lambda n: Skirmish(n, name), steps=250)


def test_teams_begin_out_of_each_others_sight_in_full_health():
    env = Skirmish(64, "3m")
    first = env.reset(3)
    assert not first["obs"][..., 4:19].reshape(64, 3, 3, 5)[..., 0].any()
    assert first["alive"].all()
    assert not first["mask"][..., FIRST:].any()
    assert (first["obs"][..., -1] == 1).all()
    assert not first["state"][:, 21:].any()  # nothing was done yet
    gap = env.state()["place"][:, 3:, 0].mean() - env.state()["place"][:, :3, 0].mean()
    assert abs(gap - APART) < 0.5


def test_an_observation_has_smacs_features_in_smacs_order():
    _env, seen = placed(apart=4.5)
    obs, mask = seen["obs"][0, 1], seen["mask"][0, 1]
    np.testing.assert_array_equal(obs[:4], mask[2:6])
    enemies, allies, own = obs[4:19].reshape(3, 5), obs[19:29].reshape(2, 5), obs[29:]
    for k, enemy in enumerate(enemies):
        dx, dy = 4.5, (k - 1) * 0.5
        expected = [1.0, np.hypot(dx, dy) / 9, dx / 9, dy / 9, 1.0]
        np.testing.assert_allclose(enemy, expected, rtol=1e-5, atol=1e-7)
    for ally, dy in zip(allies, (-0.5, 0.5), strict=True):
        np.testing.assert_allclose(ally, [1, 0.5 / 9, 0, dy / 9, 1], rtol=1e-5, atol=1e-7)
    assert own == [1.0]


def test_a_state_has_allies_enemies_and_what_was_done_last():
    env, _ = placed(apart=4.0)
    seen = env.step(np.array([[FIRST + 2, STOP, NORTH]])).observation
    allies, enemies = seen["state"][0, :12].reshape(3, 4), seen["state"][0, 12:21].reshape(3, 3)
    health = env.state()["health"][0]
    np.testing.assert_allclose(allies[:, 0], health[:3] / 45, rtol=1e-6)
    np.testing.assert_allclose(enemies[:, 0], health[3:] / 45, rtol=1e-6)
    assert allies[0, 1] > 0
    assert not allies[1:, 1].any()
    np.testing.assert_allclose(allies[:, 2], -2 / 32, rtol=1e-5)
    np.testing.assert_allclose(enemies[:, 1], 2 / 32, rtol=1e-5)
    did = seen["state"][0, 21:].reshape(3, 9)
    np.testing.assert_array_equal(did.argmax(axis=1), [FIRST + 2, STOP, NORTH])
    assert did.sum() == 3


def test_shields_and_kinds_are_told_where_there_are_several():
    _env, seen = placed("2s3z", apart=4.0)
    enemies = seen["obs"][0, 0, 4:44].reshape(5, 8)
    np.testing.assert_array_equal(enemies[:, 4:6], 1)  # health and shield
    np.testing.assert_array_equal(enemies[:, 6:], [[1, 0]] * 2 + [[0, 1]] * 3)
    np.testing.assert_array_equal(seen["obs"][0, :, -4:-2], 1)
    np.testing.assert_array_equal(seen["obs"][0, :, -2:], [[1, 0]] * 2 + [[0, 1]] * 3)


def test_attacks_are_legal_within_six_and_seen_within_nine():
    for apart, seen_at_all, legal in ((5.5, True, True), (8.5, True, False), (9.5, False, False)):
        _, seen = placed(apart=apart)
        assert bool(seen["obs"][0, 0, 5] > 0) == seen_at_all
        assert bool(seen["mask"][0, 0, FIRST]) == legal
        assert seen["obs"][0, 0, 4] == legal


def test_a_marine_shoots_six_points_every_fourteen_loops():
    env, _ = placed(apart=5.0)
    state = env.state()
    state["wait"][:, 3:] = 1e6  # the enemies cannot shoot
    env.load_state(state)
    dealt = []
    for _ in range(7):
        env.step(np.array([[FIRST, STOP, STOP]]))
        dealt.append(round(45 - float(env.state()["health"][0, 3])))
    # 8 loops a step, one shot every 13.7 loops, the first at once
    assert dealt == [6, 12, 12, 18, 18, 24, 30]


def test_damage_goes_through_the_shield_first_and_armour_weakens_it():
    env, _ = placed("2s3z", apart=1.5)
    state = env.state()
    state["wait"][:, 5:] = 1e6
    state["wait"][:, 1:5] = 1e6
    state["shield"][:, 5] = 4.0
    env.load_state(state)
    env.step(np.array([[FIRST, STOP, STOP, STOP, STOP]]))
    after = env.state()
    # 18 points on an armoured target: 4 on the shield, 14/18 of 17 on the health
    assert after["shield"][0, 5] == 0
    np.testing.assert_allclose(80 - after["health"][0, 5], 14 / 18 * 17, rtol=1e-5)


def test_a_zealot_walks_up_to_what_it_attacks():
    env, _ = placed("2s3z", apart=5.5)
    state = env.state()
    state["wait"][:, 5:] = 1e6
    env.load_state(state)
    before = state["place"][0, 2, 0]
    env.step(np.array([[STOP, STOP, FIRST + 2, STOP, STOP]]))
    after = env.state()
    assert after["place"][0, 2, 0] > before + 1
    assert after["health"][0, 7] == 100
    assert after["shield"][0, 7] == 50


def test_moves_go_where_they_say_by_a_marines_speed():
    env, _ = placed(apart=30.0)
    state = env.state()
    before = state["place"][0, :3].copy()
    env.step(np.array([[NORTH, SOUTH, EAST]]))
    moved = env.state()["place"][0, :3] - before
    far = 3.15 / 22.4 * 8
    np.testing.assert_allclose(moved, [[0, far], [0, -far], [far, 0]], rtol=1e-4, atol=1e-5)


def test_nobody_may_leave_the_field():
    env, _ = placed(apart=SIDE - 0.5)
    seen = env._observe()
    assert not seen["mask"][0, :, WEST].any()
    assert seen["mask"][0, :, EAST].all()
    assert not seen["obs"][0, :, WEST - 2].any()


def test_an_illegal_action_is_refused_by_name():
    env = Skirmish(2, "3m")
    env.reset(0)
    with pytest.raises(ValueError, match="action 6 of agent 1 in env 1 is not legal"):
        env.step(np.array([[STOP] * 3, [STOP, FIRST, STOP]]))


def test_the_dead_only_do_nothing_and_are_not_seen():
    env, _ = placed(apart=4.0)
    state = env.state()
    state["health"][0, 1] = state["health"][0, 4] = 0.0
    env.load_state(state)
    seen = env._observe()
    np.testing.assert_array_equal(seen["alive"][0], [True, False, True])
    assert np.flatnonzero(seen["mask"][0, 1]).tolist() == [NOTHING]
    assert not seen["mask"][0, [0, 2], NOTHING].any()
    assert not seen["mask"][0, :, FIRST + 1].any()
    assert not seen["obs"][0, 1].any()
    assert not seen["obs"][0, 0, 9:14].any()  # the dead enemy
    assert not seen["obs"][0, 0, 19:24].any()  # the dead ally
    assert not seen["state"][0, 4:8].any()
    assert not seen["state"][0, 15:18].any()


def test_a_won_battle_gives_twenty_in_all_and_terminates():
    env, seen = placed(apart=5.0)
    state = env.state()
    state["wait"][:, 3:] = 1e6
    env.load_state(state)
    total = 0.0
    for _ in range(60):
        mask = seen["mask"][0, :, FIRST:]
        step = env.step(np.where(mask.any(axis=1), FIRST + mask.argmax(axis=1), STOP)[None])
        seen, total = step.observation, total + float(step.reward[0])
        if step.terminated[0]:
            break
    assert step.score.won[0]
    assert not step.truncated[0]
    assert total == pytest.approx(20.0, rel=1e-5)
    after = env.step(np.zeros((1, 3), np.int64))
    assert not after.valid[0]
    assert after.reward[0] == 0
    assert not after.score.won[0]
    assert after.observation["alive"].all()


def test_a_lost_battle_terminates_and_is_not_won():
    env, seen = placed(apart=5.0)
    for _ in range(60):
        step = env.step(np.where(seen["alive"], STOP, NOTHING))
        seen = step.observation
        if step.terminated[0]:
            break
    assert step.terminated[0]
    assert not step.score.won[0]
    assert not seen["alive"].any()


def test_a_kill_is_worth_ten_points_more_than_its_damage():
    env, _ = placed(apart=5.0)
    state = env.state()
    state["wait"][:, 3:] = 1e6
    state["health"][0, 3] = 6.0
    env.load_state(state)
    step = env.step(np.array([[FIRST, STOP, STOP]]))
    assert step.reward[0] == pytest.approx((6 + 10) * 20 / (3 * 45 + 3 * 10 + 200), rel=1e-5)


def test_a_battle_is_cut_at_its_limit():
    env, _ = placed(apart=5.0)
    state = env.state()
    state["wait"][:] = 1e6
    env.load_state(state)
    ends = []
    for _ in range(61):
        step = env.step(np.full((1, 3), STOP))
        ends.append((bool(step.truncated[0]), bool(step.terminated[0]), bool(step.valid[0])))
    assert ends[:59] == [(False, False, True)] * 59
    assert ends[59:] == [(True, False, True), (False, False, False)]


def test_chance_does_not_win():
    env, rng = Skirmish(64, "3m"), np.random.default_rng(0)
    seen, won, ended = env.reset(0), 0, 0
    for _ in range(150):
        step = env.step(random_legal(seen["mask"], rng))
        seen = step.observation
        won, ended = won + step.score.won.sum(), ended + step.terminated.sum()
    assert ended > 200
    assert won / ended < 0.02


def test_a_picture_shows_both_teams():
    env, _ = placed(apart=4.0)
    picture = env.render()
    assert picture.shape == (256, 256, 3)
    assert picture.dtype == np.uint8
    blue = (picture[..., 2] == 255) & (picture[..., 0] == 0)
    red = (picture[..., 0] == 255) & (picture[..., 2] == 0)
    assert blue.any()
    assert red.any()
    assert np.argwhere(blue)[:, 1].max() < np.argwhere(red)[:, 1].min()


def test_an_unknown_battle_is_refused_with_the_nearest():
    with pytest.raises(Refusal, match="3m"):
        make_env("skirmish/3n", 1, {})


def test_the_checker_notices_a_mask_that_allows_nothing():
    class Paralysed(Skirmish):
        def _observe(self):
            seen = super()._observe()
            seen["mask"] = seen["mask"] & False
            return seen

    with pytest.raises(AssertionError, match="allows no action at all"):
        check_env(lambda n: Paralysed(n, "3m"), steps=5)


def test_a_share_of_lapses_that_is_none_is_refused():
    with pytest.raises(Refusal, match="between 0 and 1"):
        make_env("skirmish/3m", 1, {"lapses": 1.5})


def test_enemies_that_always_lapse_do_nothing():
    env = make_env("skirmish/3m", 1, {"lapses": 1.0})
    env.reset(0)
    before = env.state()["place"][:, 3:]
    for _ in range(20):
        env.step(np.full((1, 3), STOP))
    np.testing.assert_array_equal(env.state()["place"][:, 3:], before)
