"""Twin delayed deep deterministic policy gradient (Fujimoto et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from tianji import networks, off_policy
from tianji.algorithm import Count, Decision, Fraction, Metrics, NotNegative, Positive, Spec
from tianji.distributions import bounds
from tianji.off_policy import Networks, OffPolicy
from tianji.role import generator
from tianji.types import Leaves, Params, Rollout


@dataclass(frozen=True)
class TD3(OffPolicy):
    """Off-policy, for continuous actions; batches are drawn from replay."""

    name: ClassVar[str] = "td3"

    learning_rate: Positive = 3e-4
    """Adam's step size, of policy and critics"""
    gamma: Fraction = 0.99
    """discount per step"""
    batch_size: Count = 256
    """steps that one update consumes"""
    new_steps: Count = 1
    """new steps for each update, resets counted; batch_size / new_steps is the replay ratio"""
    capacity: Count = 1_000_000
    """steps that replay holds, resets counted; rounded up to whole rollouts"""
    warmup: Count = 25_000
    """steps before the first update, resets counted; their actions are random"""
    n_step: Count = 1
    """rewards that a target sums before it bootstraps"""
    policy_every: Count = 2
    """updates of the critics for each one of the policy and of all targets"""
    tau: Fraction = 0.005
    """share of the way that targets go at each update of the policy"""
    exploration: NotNegative = 0.1
    """deviation of the noise added to actions; they are scaled to -1..1"""
    smoothing: NotNegative = 0.2
    """deviation of the noise added to the actions that targets are valued with"""
    smoothing_clip: NotNegative = 0.5
    """how far that noise may reach"""
    max_grad_norm: NotNegative = 0.0
    """gradients are scaled down to this norm; 0: never"""

    def check(self, spec: Spec) -> None:
        bounds(self.name, spec.env)
        self.check_replay(spec, self.n_step)

    def make_networks(self, spec: Spec) -> Networks:
        d = len(bounds(self.name, spec.env).reach)
        policy = _module(spec, d)
        critics = networks.Critics(spec.network, spec.env.observation["obs"], d)
        modules = {"policy": policy, "critics": critics}
        return Networks(
            {name: {name: module} for name, module in modules.items()},
            {name: {f"target_{name}": module} for name, module in modules.items()},
            {"policy": policy},
            "random",
        )

    def policy(self, spec: Spec, device: str = "cpu") -> Policy:
        return Policy(self, spec)

    def trainer(self, spec: Spec, device: str = "cpu") -> Trainer:
        return Trainer(self, spec, device)


def _module(spec: Spec, outputs: int) -> nn.Module:
    """The policy's network; its action is tanh of what it gives."""
    (module,) = networks.build(spec.network, spec.env.observation["obs"], outputs)
    return module


class Policy:
    """The network's action and some noise; before the first update, anywhere within the bounds."""

    def __init__(self, hyper: TD3, spec: Spec) -> None:
        self._bounds = bounds(hyper.name, spec.env)
        self._exploration = np.float32(hyper.exploration)
        module = _module(spec, len(self._bounds.reach))
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
        if rng is not None and self._random:
            drawn = rng.uniform(-1, 1, (len(obs), len(self._bounds.reach))).astype(np.float32)
            return Decision(self._bounds.outer(drawn), state, {})
        action = np.tanh(self._network(obs))
        if rng is not None:
            action += self._exploration * rng.standard_normal(action.shape, dtype=np.float32)
        return Decision(self._bounds.outer(action), state, {})


class Trainer(off_policy.Trainer):
    """A step of the critics on a batch from replay, and now and then one of the policy."""

    def __init__(self, hyper: TD3, spec: Spec, device: str = "cpu") -> None:
        self._hyper = hyper
        self._bounds = bounds(hyper.name, spec.env)
        made = hyper.make_networks(spec)
        self._policy, critics = made.acting["policy"], made.modules["critics"]["critics"]
        assert isinstance(critics, networks.Critics)
        self._critics = critics
        rng = generator(spec.seed, "init")
        networks.initialise(self._policy, rng, 2**0.5, last=0.01)
        self._critics.initialise(rng, 2**0.5, last=1.0)
        super().__init__(hyper, spec, device, made, together=True)
        self._target_policy = self._copies["policy"]["target_policy"]
        self._target_critics = self._copies["critics"]["target_critics"]
        self._policy_loss = torch.zeros(())
        """of the policy's last step"""
        self.state.arrays["policy_loss"] = self._policy_loss.numpy()

    def _learn(self, part: Rollout) -> Metrics:
        rate = self._hyper.learning_rate
        rows = part.valid.size  # replay draws valid steps only
        now, then = self._tensor(part.observation["obs"])  # each [N, ...]
        action = self._tensor(self._bounds.inner(part.action[0]))  # [N, d]
        values = self._critics(now, action)  # [2, N]
        loss = (values - self._values(part, then)).square().mean(1).sum()
        norm = self._optimizers["critics"].step(loss, rate, rows)
        if self._updates % self._hyper.policy_every == 0:
            self._critics.requires_grad_(False)
            policy_loss = -self._critics(now, torch.tanh(self._policy(now)), heads=1).mean()
            self._optimizers["policy"].step(policy_loss, rate, rows)
            self._critics.requires_grad_(True)
            self._policy_loss.copy_(policy_loss.detach())
            self._follow(0, self._hyper.tau)
        policy_loss = self._policy_loss.to(self._device)
        told = torch.stack([loss.detach(), policy_loss, values.detach().mean(), norm])
        names = ("loss", "policy_loss", "q_mean", "grad_norm")
        return self._means(names, told, rows) | {"learning_rate": rate}

    def _scalar(self, version: int) -> float:
        return version == 0

    def _values(self, part: Rollout, then: Tensor) -> Tensor:
        """r + discount min Q'(s', pi'(s') + noise), [N]."""
        hyper, d = self._hyper, len(self._bounds.reach)
        reward = self._tensor(part.reward)[0]
        discount = self._tensor(part.extras["discount"])[0]
        drawn = self._rng.standard_normal((hyper.batch_size, d), np.float32)[self._mine]
        reach = hyper.smoothing_clip
        noise = self._tensor(drawn).mul_(hyper.smoothing).clamp_(-reach, reach)
        with torch.no_grad():
            action = (torch.tanh(self._target_policy(then)) + noise).clamp(-1.0, 1.0)
            following: Tensor = self._target_critics(then, action).amin(0)
            return reward + discount * following
