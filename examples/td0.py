"""TD(0) with a linear value function (Sutton 1988): the smallest algorithm, and a whole one."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tianji import Refusal, register_algorithm
from tianji.algorithm import Decision, Fraction, Positive, Traits
from tianji.description import Description, averaged
from tianji.env import Discrete
from tianji.store import chooser_once, gatherer_once, served_once
from tianji.train_state import TrainState
from tianji.types import Params


@register_algorithm("td0")
@dataclass(frozen=True)
class TD0:
    """What are states worth to one who acts at random? V(s) = theta . s, by V's own errors."""

    name: ClassVar[str] = "td0"
    traits: ClassVar = Traits(on_policy=True, once=True)

    alpha: Positive = 0.1
    """step size"""
    gamma: Fraction = 0.9
    """discount per step"""

    def check(self, spec):
        if not isinstance(spec.env.action, Discrete):
            raise Refusal(f'td0 cannot act in {spec.env.id}. Set algorithm.name = "ppo".')
        if spec.learners > 1 or spec.join == "hogwild":
            raise Refusal("td0 has no gradients to share. Set scale.learners = 1, and no a3c.")

    def steps_per_update(self, spec):
        return spec.actors * spec.rows_per_rollout  # one rollout of each actor

    def warmup_steps(self, spec):
        return 0

    def describe(self, spec):  # what the parts will be like; none is made for it
        theta, served = {"theta": spec.env.observation["obs"]}, served_once(spec, spec.actors)
        return Description(theta, averaged(theta), *served)

    def policy(self, spec, device="cpu"):
        return Policy(spec)

    def chooser(self, spec, lanes):
        return chooser_once(spec, lanes)  # each rollout is consumed once

    def gatherer(self, spec, lanes):
        return gatherer_once(spec, lanes)

    def trainer(self, spec, device="cpu"):
        return Trainer(self, spec)


class Policy:
    """On the actor: without a model of the env, values of states do not say what to do."""

    def __init__(self, spec):
        self._actions = spec.env.action.n

    def initial(self, B):
        return {}  # no recurrent state

    def load(self, params):  # I: parameters, from learning to acting
        self._theta = params["theta"]

    def act(self, observation, state, rng):  # II: actions, from acting to simulating
        B = len(observation["obs"])
        action = np.zeros(B, np.int64) if rng is None else rng.integers(self._actions, size=B)
        return Decision(action, state, {})


class Trainer:
    """On the learner: one step of gradient descent for each step of the envs."""

    def __init__(self, hyper, spec):
        self._hyper = hyper
        self._params = Params(hyper.describe(spec).params)  # zeros
        self._errors = []
        self.state = TrainState(learnt={"theta": self._params["theta"]})  # by name

    def take(self, part):  # III: samples, from simulating to learning
        theta, s = self._params["theta"], part.observation["obs"]  # s: [T + 1, B, features]
        for t, valid in enumerate(part.valid):
            follows = np.where(part.terminated[t], 0.0, s[t + 1] @ theta)
            delta = part.reward[t] + self._hyper.gamma * follows - s[t] @ theta  # [B]
            delta[~valid] = 0.0  # these only reset their env
            theta += self._hyper.alpha * delta @ s[t] / max(1, valid.sum())
            self._errors.append(np.square(delta).mean())

    def finish(self):
        loss, self._errors = float(np.mean(self._errors)), []
        return {"loss": loss}

    def params(self, version):
        return self._params
