"""Soft actor-critic (Haarnoja et al. 2018b): twin critics, and a temperature that tunes itself."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from tianji import networks, off_policy
from tianji.algorithm import Count, Decision, Fraction, Metrics, NotNegative, Positive, Spec
from tianji.distributions import Squashed, bounds
from tianji.off_policy import Networks, OffPolicy
from tianji.role import generator
from tianji.types import Array, Leaves, Params, Rollout


@dataclass(frozen=True)
class SAC(OffPolicy):
    """Off-policy, for continuous actions; batches are drawn from replay."""

    name: ClassVar[str] = "sac"

    learning_rate: Positive = 3e-4
    """Adam's step size, of policy, critics and temperature"""
    gamma: Fraction = 0.99
    """discount per step"""
    batch_size: Count = 256
    """steps that one update consumes"""
    new_steps: Count = 1
    """new steps for each update, resets counted; batch_size / new_steps is the replay ratio"""
    capacity: Count = 1_000_000
    """steps that replay holds, resets counted; rounded up to whole rollouts"""
    warmup: Count = 5_000
    """steps before the first update, resets counted; their actions are random"""
    n_step: Count = 1
    """rewards that a target sums before it bootstraps; their entropies are left out"""
    tau: Fraction = 0.005
    """share of the way that the target critics go at each update"""
    temperature: Positive = 1.0
    """weight of the entropy beside the reward, at the start"""
    tune: bool = True
    """learn the temperature, so that the policy keeps the target entropy; false: it stays"""
    target_entropy: float | None = None
    """nats that the policy keeps, its actions scaled to -1..1; none: minus their dimensions"""
    max_grad_norm: NotNegative = 0.0
    """gradients are scaled down to this norm; 0: never"""

    def check(self, spec: Spec) -> None:
        bounds(self.name, spec.env)
        self.check_replay(spec, self.n_step)

    def make_networks(self, spec: Spec) -> Networks:
        d = len(bounds(self.name, spec.env).reach)
        policy = _module(spec, Squashed(d).width)
        critics = networks.Critics(spec.network, spec.env.observation["obs"], d)
        start = torch.tensor(math.log(self.temperature))
        temperature = nn.ParameterDict({"log_alpha": nn.Parameter(start)})
        modules = {"policy": policy, "critics": critics, "temperature": temperature}
        return Networks(
            {name: {name: module} for name, module in modules.items()},
            {"critics": {"target": critics}},
            {"policy": policy},
            "random",
        )

    def policy(self, spec: Spec, device: str = "cpu") -> Policy:
        return Policy(self, spec)

    def trainer(self, spec: Spec, device: str = "cpu") -> Trainer:
        return Trainer(self, spec, device)


def _module(spec: Spec, outputs: int) -> nn.Module:
    """The policy's network."""
    (module,) = networks.build(spec.network, spec.env.observation["obs"], outputs)
    return module


class Policy:
    """Draw from a squashed normal; before the first update, anywhere within the bounds."""

    def __init__(self, hyper: SAC, spec: Spec) -> None:
        self._bounds = bounds(hyper.name, spec.env)
        self._over = Squashed(len(self._bounds.reach))
        module = _module(spec, self._over.width)
        observation = spec.env.observation["obs"]
        self._network = networks.inference(spec.network, observation, module, "policy")
        self._random = True

    def initial(self, B: int) -> Leaves:
        return {}

    def load(self, params: Params) -> None:
        self._network.load(params)
        self._random = bool(params["random"])

    def act(self, observation: Leaves, state: Leaves, rng: np.random.Generator | None) -> Decision:
        obs = observation["obs"]
        if rng is None:
            action = self._over.greedy(self._network(obs))
        elif self._random:
            action = rng.uniform(-1, 1, (len(obs), len(self._bounds.reach))).astype(np.float32)
        else:
            action = self._over.sample(self._network(obs), rng)
        return Decision(self._bounds.outer(action), state, {})


class Trainer(off_policy.Trainer):
    """One step each of critics, policy and temperature on a batch from replay."""

    def __init__(self, hyper: SAC, spec: Spec, device: str = "cpu") -> None:
        self._hyper = hyper
        self._bounds = bounds(hyper.name, spec.env)
        d = len(self._bounds.reach)
        self._over = Squashed(d)
        self._entropy = -float(d) if hyper.target_entropy is None else hyper.target_entropy
        made = hyper.make_networks(spec)
        self._policy, critics = made.acting["policy"], made.modules["critics"]["critics"]
        assert isinstance(critics, networks.Critics)
        self._critics = critics
        rng = generator(spec.seed, "init")
        networks.initialise(self._policy, rng, 2**0.5, last=0.01)
        self._critics.initialise(rng, 2**0.5, last=1.0)
        super().__init__(hyper, spec, device, made, together=True)
        self._target = self._copies["critics"]["target"]
        (self._log_alpha,) = made.modules["temperature"]["temperature"].parameters()

    def _learn(self, part: Rollout) -> Metrics:
        rate = self._hyper.learning_rate
        rows = part.valid.size  # replay draws valid steps only
        now, then = self._tensor(part.observation["obs"])  # each [N, ...]
        action = self._tensor(self._bounds.inner(part.action[0]))  # [N, d]
        later, here = self._tensor(self._noise(action.shape[1]))
        alpha = self._log_alpha.detach().exp()

        target = self._targets(part, then, later, alpha)
        values = self._critics(now, action)  # [2, N]
        critic_loss = 0.5 * (values - target).square().mean(1).sum()
        norm = self._optimizers["critics"].step(critic_loss, rate, rows)

        chosen, log_prob = self._over.draw(self._policy(now), here)
        self._critics.requires_grad_(False)
        value = self._critics(now, chosen).amin(0)
        policy_loss = (alpha * log_prob - value).mean()
        self._optimizers["policy"].step(policy_loss, rate, rows)
        self._critics.requires_grad_(True)

        excess = (log_prob.detach() + self._entropy).mean()
        if self._hyper.tune:
            # By the log of alpha: the paper's gradient over alpha, so that a small one still moves.
            loss = -self._log_alpha * excess
            self._optimizers["temperature"].step(loss, rate, rows)
        self._follow(0, self._hyper.tau)

        told = {
            "loss": critic_loss.detach(),
            "policy_loss": policy_loss.detach(),
            "q_mean": values.detach().mean(),
            "entropy": self._entropy - excess,
            "temperature": alpha,
            "grad_norm": norm,
        }
        means = self._means(told, torch.stack(list(told.values())), rows)
        return means | {"learning_rate": rate}

    def _scalar(self, version: int) -> float:
        return version == 0

    def _targets(self, part: Rollout, then: Tensor, noise: Tensor, alpha: Tensor) -> Tensor:
        """r + discount (min Q'(s', a') - alpha log pi(a' | s')), [N]."""
        reward = self._tensor(part.reward)[0]
        discount = self._tensor(part.extras["discount"])[0]
        with torch.no_grad():
            action, log_prob = self._over.draw(self._policy(then), noise)
            following: Tensor = self._target(then, action).amin(0) - alpha * log_prob
            return reward + discount * following

    def _noise(self, d: int) -> Array:
        """Standard normal, for the actions that follow and for those here: [2, N, d]."""
        whole = self._rng.standard_normal((2, self._hyper.batch_size, d), np.float32)
        return whole[:, self._mine]
