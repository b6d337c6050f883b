"""REINFORCE (Williams 1992) with a learnt baseline: an algorithm of one's own, in one file."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from tianji import Refusal, networks, register_algorithm, returns
from tianji.algorithm import Decision, Fraction, Positive, Traits
from tianji.description import Description, averaged
from tianji.distributions import distribution
from tianji.env import Discrete
from tianji.optim import Optimizer
from tianji.role import generator
from tianji.store import chooser_once, gatherer_once, served_once
from tianji.train_state import TrainState
from tianji.types import Params


@register_algorithm("reinforce")
@dataclass(frozen=True)
class Reinforce:
    """On-policy, for discrete actions; one gradient step for each batch."""

    name: ClassVar[str] = "reinforce"
    traits: ClassVar = Traits(on_policy=True, once=True)

    learning_rate: Positive = 3e-3
    """Adam's step size"""
    gamma: Fraction = 0.99
    """discount per step"""

    def check(self, spec):
        if not isinstance(spec.env.action, Discrete):
            raise Refusal(f'{spec.env.id} has no discrete actions. Set algorithm.name = "ppo".')

    def steps_per_update(self, spec):
        return spec.actors * spec.rows_per_rollout  # one rollout of each actor

    def warmup_steps(self, spec):
        return 0

    def describe(self, spec):
        """What the parts will be like; none is made for it, and no memory is taken."""
        with torch.device("meta"):
            modules = make_modules(spec)
        return Description(
            networks.layout({"policy": modules["policy"]}),
            averaged(networks.layout(modules)),
            *served_once(spec, spec.actors),
            gradients=True,
        )

    def policy(self, spec, device="cpu"):
        return Policy(spec)

    def chooser(self, spec, lanes):
        return chooser_once(spec, lanes)  # each rollout is consumed once

    def gatherer(self, spec, lanes):
        return gatherer_once(spec, lanes)

    def trainer(self, spec, device="cpu"):
        return Trainer(self, spec, device)


def make_modules(spec):
    observation = spec.env.observation["obs"]
    policy, value = networks.build(spec.network, observation, spec.env.action.n, 1)
    return {"policy": policy, "value": value}


class Policy:
    """On the actor: choose, and record nothing beside the action."""

    def __init__(self, spec):
        module = make_modules(spec)["policy"]
        observation = spec.env.observation["obs"]
        self._over = distribution(spec.env.action)
        self._network = networks.inference(spec.network, observation, module, "policy")

    def initial(self, B):
        return {}  # no recurrent state

    def load(self, params):
        self._network.load(params)

    def act(self, observation, state, rng):
        logits = self._network(observation["obs"])
        if rng is None:
            return Decision(self._over.greedy(logits), state, {})
        action, _ = self._over.sample(logits, {}, rng)
        return Decision(action, state, {})


class Trainer:
    """On the learner: take the parts of a batch, then make one update of them."""

    def __init__(self, hyper, spec, device):
        self._hyper, self._device = hyper, device
        self._over = distribution(spec.env.action)
        self._modules, rng = make_modules(spec), generator(spec.seed, "init")
        for module in self._modules.values():
            networks.initialise(module, rng, 2**0.5, last=0.01)
            module.to(device)
        self._optimizer = Optimizer(
            self._modules, 0.5, team=spec.team, shared=spec.shared, gradients=spec.gradients
        )
        self.state = TrainState({"all": self._optimizer})
        self._params = Params(hyper.describe(spec).params)
        self._losses, self._rows = [], 0

    def take(self, part):
        obs = torch.from_numpy(part.observation["obs"]).to(self._device)  # [T + 1, B, ...]
        value = self._modules["value"](obs.flatten(0, 1)).view(obs.shape[:2])
        # Returns to the end of the episode; where the rollout ends first, a value stands in.
        target = returns.td_lambda(
            part.reward, value.detach().cpu().numpy(), part.terminated, part.valid,
            self._hyper.gamma, lam=1.0,
        )  # fmt: skip
        valid = torch.from_numpy(part.valid).to(self._device)
        error = (torch.from_numpy(target).to(self._device) - value[:-1])[valid]
        logits = self._modules["policy"](obs[:-1][valid])
        action = torch.from_numpy(part.action).to(self._device)[valid]
        log_prob, _ = self._over.evaluate(logits, {}, action)
        self._losses.append((-log_prob * error.detach() + 0.5 * error.square()).sum())
        self._rows += len(error)

    def finish(self):
        loss = torch.stack(self._losses).sum() / max(1, self._rows)
        norm = self._optimizer.step(loss, self._hyper.learning_rate, self._rows)
        self._losses, self._rows = [], 0
        return {"loss": float(loss.detach()), "grad_norm": float(norm)}

    def params(self, version):
        for name, array in self._optimizer.flat.arrays().items():
            if name in self._params:
                np.copyto(self._params[name], array)
        return self._params
