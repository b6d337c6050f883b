"""What becomes of gradients before the step, by formula and where it matters: with delay."""

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from tianji.algorithm import Gradients
from tianji.algorithms.dqn import DQN
from tianji.algorithms.ppo import PPO
from tianji.algorithms.sac import SAC
from tianji.build import build
from tianji.config import RelaxConfig, ScaleConfig, load_config
from tianji.driver import Serial
from tianji.env import make_env
from tianji.errors import Refusal
from tianji.gradients import Age, Alignment, transform
from tianji.optim import Optimizer
from tianji.state import decode, encode
from tianji.testing.algorithm import config_for, run_updates

LOW, HIGH, FLOOR = Alignment.LOW, Alignment.HIGH, Alignment.FLOOR


def descend(delay, rate, control, steps=800, d=200, seed=0):
    """Gradient descent on a noisy quadratic, by gradients at where it was `delay` steps ago; how
    far from the minimum it ends, and the mean cosine between gradients."""
    rng = torch.Generator().manual_seed(seed)
    scale = torch.linspace(0.1, 1.0, d)
    places, aligned, before = [torch.ones(d)], [], None
    for k in range(steps):
        stale = places[max(0, k - delay)]
        gradient = scale * stale + 0.3 * torch.randn(d, generator=rng)
        if before is not None:
            aligned.append(float(torch.cosine_similarity(gradient, before, 0)))
        before = gradient.clone()
        factor = 1.0 if control is None else control(gradient, delay).factor
        places.append(places[-1] - rate * factor * gradient)
        if not places[-1].norm() < 1e6:
            return float("inf"), float(np.mean(aligned[-100:]))
    return float(places[-1].norm() / d**0.5), float(np.mean(aligned[-100:]))


@pytest.mark.parametrize(("delay", "rate"), [(8, 0.3), (16, 0.15), (16, 0.3)])
def test_delayed_descent_diverges_and_with_alignment_control_it_does_not(delay, rate):
    plain, aligned = descend(delay, rate, None)
    controlled, _ = descend(delay, rate, Alignment())
    assert plain > 10, "the delay must be a problem, or nothing is shown"
    assert aligned > 0.9, "the signature of overshooting"
    assert controlled < 1.5


def test_without_delay_alignment_control_leaves_descent_as_good_as_it_was():
    plain, aligned = descend(0, 0.1, None)
    controlled, _ = descend(0, 0.1, Alignment())
    assert abs(aligned) < 0.1
    assert controlled == pytest.approx(plain, rel=0.05)


def pair(c, d=6):
    """Two gradients of different lengths whose cosine is c."""
    first, second = torch.zeros(d), torch.zeros(d)
    first[0] = 3.0
    second[0], second[1] = 2.0 * c, 2.0 * (1 - c * c) ** 0.5
    return first, second


@pytest.mark.parametrize("c", [-0.9, 0.0, 0.29, 0.31, 0.5, 0.7, 0.86, 0.899])
def test_the_part_along_the_last_gradient_is_scaled_by_the_formula(c):
    control, (first, second) = Alignment(), pair(c)
    before = first.clone()
    assert control(first, 0.0) == (1.0, False)
    assert torch.equal(first, before)
    factor, damped = control(second, 0.0)
    kept = 1.0 if c <= LOW else max(FLOOR, (HIGH - c) / (HIGH - LOW))
    assert (factor, damped) == (1.0, c > LOW)
    expected = pair(c)[1]
    expected[0] *= kept
    torch.testing.assert_close(second, expected)


def test_equal_gradients_are_left_out_at_most_once_in_a_row():
    """Parameters that do not move have equal gradients: without the cap they never would again."""
    control = Alignment()
    factors = [control(torch.ones(3), 0.0).factor for _ in range(9)]
    assert factors == [1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0]
    gradient = torch.ones(3)
    assert control(gradient, 0.0).factor == 0.0
    assert control(gradient, 0.0) == (1.0, True)
    torch.testing.assert_close(gradient, torch.full((3,), FLOOR))


def test_a_gradient_of_zero_or_nan_is_no_reason_to_fail():
    control = Alignment()
    for value in (0.0, 0.0, 1.0, float("nan"), 1.0):
        assert control(torch.full((2,), value), 0.0).factor == 1.0


@pytest.mark.parametrize("staleness", [0.0, 1.0, 3.5, 8.0])
def test_steps_of_old_batches_are_shorter_by_the_formula(staleness):
    gradient = torch.tensor([3.0, -4.0])
    factor, damped = Age()(gradient, staleness)
    assert factor == pytest.approx(1 / (1 + staleness) ** 0.5)
    assert damped == (staleness > 0)
    assert gradient.tolist() == [3.0, -4.0]


class Point(nn.Module):
    def __init__(self, *place):
        super().__init__()
        self.x = nn.Parameter(torch.tensor(place))


def test_an_optimizer_makes_a_step_of_the_size_that_the_age_allows():
    moved = []
    for staleness in (0.0, 3.0):
        point, gradients = Point(1.0), Gradients("age", staleness=staleness)
        Optimizer({"p": point}, gradients=gradients).step(point.x.sum(), 0.1, 1)
        moved.append(1.0 - point.x.item())
        assert gradients.told() == {"gradient_skipped": 0.0, "gradient_damped": staleness > 0}
    assert moved == pytest.approx([0.1, 0.05])


def test_a_step_that_is_left_out_moves_neither_parameters_nor_moments():
    point, gradients = Point(1.0, 2.0), Gradients("gac")
    optimizer = Optimizer({"p": point}, gradients=gradients)
    optimizer.step(point.x.sum(), 0.1, 1)
    before = optimizer.state()
    assert optimizer.step(point.x.sum(), 0.1, 1) == pytest.approx(2**0.5)
    after = optimizer.state()
    assert gradients.told() == {"gradient_skipped": 0.5, "gradient_damped": 0.0}
    assert gradients.told() == {"gradient_skipped": 0.0, "gradient_damped": 0.0}
    assert np.array_equal(before["parameters"]["p.x"], after["parameters"]["p.x"])
    assert all(np.array_equal(before["moments"][k], after["moments"][k]) for k in ("m", "v"))
    assert after["transform"]["skips"] == 1


def test_what_is_asked_of_gradients_is_saved_and_goes_on_after_loading():
    rng = torch.Generator().manual_seed(1)
    slopes = torch.randn(12, 3, generator=rng) + torch.tensor([2.0, 0.0, 0.0])
    point = Point(1.0, 2.0, 3.0)
    one = Optimizer({"p": point}, gradients=Gradients("gac"))
    for slope in slopes[:6]:
        one.step(point.x @ slope, 0.1, 1)
    arrays = {}
    tree = encode(one.state(), "learner", "", arrays)
    twin, heeds = Point(0.0, 0.0, 0.0), Gradients("gac")
    other = Optimizer({"p": twin}, gradients=heeds)
    other.load_state(decode(tree, arrays))
    for slope in slopes[6:]:
        one.step(point.x @ slope, 0.1, 1)
        other.step(twin.x @ slope, 0.1, 1)
    assert torch.equal(point.x, twin.x)
    told = heeds.told()
    assert told["gradient_damped"] > 0, "nothing was damped, so nothing was shown"


class Two:
    """One of two learners in threads."""

    size = 2

    def __init__(self, rank, desk):
        self.rank, self._desk = rank, desk

    def sum(self, tensor):
        barrier, places = self._desk
        places[self.rank] = tensor.clone()
        barrier.wait(30)
        total = places[0] + places[1]
        barrier.wait(30)
        return tensor.copy_(total)


@pytest.mark.parametrize("kind", ["gac", "age"])
def test_a_team_transforms_the_averaged_gradient_by_the_mean_staleness(kind):
    """Two learners with 1 and 3 rows of different gradients and staleness do what one would."""
    slopes, rows, behind = torch.tensor([[1.0, 0.5], [0.2, -0.4]]), (1, 3), (4.0, 0.0)
    weights = torch.tensor(rows) / sum(rows)
    alone, gradients = (
        Point(1.0, 2.0),
        Gradients(kind, staleness=float(weights @ torch.tensor(behind))),
    )
    optimizer = Optimizer({"p": alone}, gradients=gradients)
    for k in range(4):
        optimizer.step(alone.x.square() @ (weights @ slopes) * (k + 1), 0.1, 4)
    desk, points = (threading.Barrier(2), [None, None]), [Point(1.0, 2.0), Point(1.0, 2.0)]
    told = [Gradients(kind, staleness=behind[i]) for i in range(2)]

    def learn(i):
        mine = Optimizer({"p": points[i]}, team=Two(i, desk), gradients=told[i])
        for k in range(4):
            mine.step(points[i].x.square() @ slopes[i] * (k + 1), 0.1, rows[i])

    threads = [threading.Thread(target=learn, args=(i,), daemon=True) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    expected = gradients.told()
    for i in range(2):
        torch.testing.assert_close(points[i].x, alone.x)
        assert told[i].told() == expected
    assert expected["gradient_skipped" if kind == "gac" else "gradient_damped"] > 0


def toy(**kwargs):
    return lambda num_envs: make_env("toy/Identity", num_envs, kwargs)


ALGORITHMS = [
    (PPO(epochs=2, minibatches=1), {}),
    (DQN(batch_size=16, warmup=64, capacity=512, new_steps=32), {}),
    (SAC(batch_size=16, warmup=64, capacity=512, new_steps=32), {"continuous": True}),
]


@pytest.mark.parametrize(("algorithm", "kwargs"), ALGORITHMS, ids=["ppo", "dqn", "sac"])
def test_every_algorithm_reports_what_became_of_its_gradients(algorithm, kwargs):
    config = config_for(algorithm, relax=RelaxConfig(gradient="gac"))
    built = build(config, toy(**kwargs))
    built.learner.begin()
    run_updates(built, Serial(built.roles), 3)
    metrics = built.learner.report.metrics
    assert {"gradient_skipped", "gradient_damped"} <= metrics.keys()
    built.close()
    plain = build(config_for(algorithm), toy(**kwargs))
    plain.learner.begin()
    run_updates(plain, Serial(plain.roles), 3)
    assert "gradient_skipped" not in plain.learner.report.metrics
    plain.close()


def test_the_optimizer_hears_how_stale_the_batch_is():
    scale = ScaleConfig(engine="local", actors=2, envs_per_actor=4, rollout_length=8,
                        relax="bounded")  # fmt: skip
    algorithm = PPO(epochs=1, minibatches=1)
    built = build(config_for(algorithm, scale=scale, relax=RelaxConfig(gradient="age")), toy())
    built.learner.begin()
    run_updates(built, Serial(built.roles), 12)
    staleness = built.learner.report.staleness
    assert staleness.max() > 0
    assert built.learner._gradients.staleness == pytest.approx(staleness.mean())
    assert built.learner.report.metrics["gradient_damped"] == 1.0
    built.close()


def test_age_is_refused_for_replay_and_for_an_algorithm_that_would_ignore_it():
    with pytest.raises(Refusal, match=r'Set relax.gradient = "none"'):
        build(config_for(ALGORITHMS[1][0], relax=RelaxConfig(gradient="age")), toy())

    class Deaf(PPO):
        """Does not hand on what is asked of gradients."""

        name = "deaf"

        def trainer(self, spec, device="cpu"):
            return super().trainer(replace(spec, gradients=Gradients()))

    with pytest.raises(Refusal, match=r"nothing that deaf can do.*gradients=spec.gradients"):
        build(config_for(Deaf(minibatches=1), relax=RelaxConfig(gradient="gac")), toy())


def test_words_that_are_not_known_are_refused():
    tree = {"env": {"id": "CartPole-v1"}, "algorithm": {"name": "ppo"}, "stop": {"updates": 1}}
    with pytest.raises(Refusal, match="none, gac, age"):
        load_config(tree, ["relax.gradient=gag"])
    with pytest.raises(Refusal, match="none, gac, age"):
        transform("gag")
    assert load_config(tree, ["relax.gradient=gac"]).relax.gradient == "gac"
