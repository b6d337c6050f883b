"""Deep Q-learning (Mnih et al. 2015), with the double, dueling and n-step variants."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from tianji import networks
from tianji.algorithm import (
    Count,
    Decision,
    Fate,
    Fraction,
    Lanes,
    Metrics,
    NotNegative,
    Positive,
    Spec,
    Whole,
)
from tianji.env import Discrete
from tianji.errors import Refusal
from tianji.optim import Flat, Optimizer, mean_over
from tianji.role import State, generator
from tianji.store import Replay
from tianji.types import Array, Layout, Leaves, Params, Rollout


@dataclass(frozen=True)
class DQN:
    """Off-policy, for discrete actions; batches are drawn from replay."""

    name: ClassVar[str] = "dqn"
    on_policy: ClassVar[bool] = False
    explores: ClassVar[tuple[str, ...]] = ("ladder",)

    learning_rate: Positive = 1e-3
    """Adam's step size"""
    gamma: Fraction = 0.99
    """discount per step"""
    batch_size: Count = 128
    """steps that one update consumes"""
    new_steps: Count = 4
    """new steps for each update, resets counted; batch_size / new_steps is the replay ratio"""
    capacity: Count = 100_000
    """steps that replay holds, resets counted; rounded up to whole rollouts"""
    warmup: Count = 1_000
    """steps before the first update, resets counted"""
    n_step: Count = 1
    """rewards that a target sums before it bootstraps"""
    double: bool = True
    """the online network chooses the next action, the target network values it"""
    dueling: bool = False
    """the network gives a value and advantages that are added up"""
    target_every: Whole = 0
    """updates between copies to the target network; 0: it follows by tau at every update"""
    tau: Fraction = 0.01
    """share of the way that the target network goes at each update"""
    loss: Literal["huber", "mse"] = "huber"
    """of the temporal-difference error"""
    epsilon_start: Fraction = 1.0
    """share of random actions at the start"""
    epsilon_end: Fraction = 0.05
    """share of random actions at the end of the schedule"""
    epsilon_steps: Count = 10_000
    """env steps over which the share falls"""
    max_grad_norm: NotNegative = 10.0
    """the gradient is scaled down to this norm; 0: never"""

    def check(self, spec: Spec) -> None:
        if not isinstance(spec.env.action, Discrete):
            raise Refusal(
                f"dqn chooses among a finite number of actions; {spec.env.id} has "
                f"{type(spec.env.action).__name__} actions, which it cannot rank. Set "
                f'algorithm.name = "ppo".'
            )
        least = max(self.batch_size, self.n_step * spec.envs * spec.actors)
        if self.warmup < least:
            raise Refusal(
                f"algorithm.warmup = {self.warmup} is too early: the first batch needs {least} "
                f"steps (batch_size, and n_step of every env). Set warmup to {least} or more."
            )
        if self.capacity < self.warmup:
            raise Refusal(
                f"algorithm.capacity = {self.capacity} is less than warmup = {self.warmup}: the "
                f"steps gathered first would be gone before the first update. Raise capacity."
            )
        if self.batch_size % spec.learners:
            fit = max(1, round(self.batch_size / spec.learners)) * spec.learners
            raise Refusal(
                f"algorithm.batch_size = {self.batch_size} is no multiple of scale.learners = "
                f"{spec.learners}, so that their shares could not be equal. Set batch_size to "
                f"{fit}."
            )

    def steps_per_update(self, spec: Spec) -> int:
        return self.new_steps

    def warmup_steps(self, spec: Spec) -> int:
        return self.warmup

    def slots(self, spec: Spec) -> int:
        return -(-self.capacity // (spec.actors * spec.rows_per_rollout))

    def policy(self, spec: Spec) -> Policy:
        return Policy(self, spec)

    def store(self, spec: Spec, lanes: Lanes) -> Replay:
        return Replay(lanes, self.batch_size, self.slots(spec), self.gamma, self.n_step)

    def trainer(self, spec: Spec) -> Trainer:
        return Trainer(self, spec)

    def rung(self, spec: Spec) -> float | None:
        """The constant share of random actions of one actor on Ape-X's ladder (Horgan et al. 2018);
        None: the schedule holds."""
        if spec.explore != "ladder" or spec.actor is None:
            return None
        return float(0.4 ** (1 + 7 * spec.actor / max(1, spec.actors - 1)))

    def epsilon(self, version: int) -> float:
        """By the env steps that a policy version stands for."""
        share = min(1.0, version * self.new_steps / self.epsilon_steps)
        return self.epsilon_start + share * (self.epsilon_end - self.epsilon_start)


def _module(hyper: DQN, spec: Spec) -> nn.Module:
    """Values of the n actions; dueling: their advantages and the state's value, n + 1 outputs."""
    assert isinstance(spec.env.action, Discrete)
    outputs = spec.env.action.n + hyper.dueling
    (module,) = networks.build(spec.network, spec.env.observation["obs"], outputs)
    return module


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """What a snapshot holds: the parameters in their order, then epsilon."""
    return networks.shapes({"q": module}) | {"epsilon": ()}


class Policy:
    """The best action, or with probability epsilon any."""

    extras: ClassVar[Layout] = {}

    def __init__(self, hyper: DQN, spec: Spec) -> None:
        assert isinstance(spec.env.action, Discrete)
        module = _module(hyper, spec)
        observation = spec.env.observation["obs"]
        self._network = networks.inference(spec.network, observation, module, "q")
        self._actions = spec.env.action.n
        self._epsilon = 1.0
        self._rung = hyper.rung(spec)
        self.shapes = _shapes(module)

    def initial(self, B: int) -> Leaves:
        return {}

    def load(self, params: Params) -> None:
        self._network.load(params)
        self._epsilon = float(params["epsilon"]) if self._rung is None else self._rung

    def act(self, observation: Leaves, state: Leaves, rng: np.random.Generator | None) -> Decision:
        # The state's value of a dueling network is the same for all actions: no need to add it.
        action: Array = self._network(observation["obs"])[:, : self._actions].argmax(axis=1)
        if rng is not None:
            any_action = rng.integers(self._actions, size=len(action))
            explore = rng.random(len(action)) < self._epsilon
            action = np.where(explore, any_action, action)
        return Decision(action, state, {})


class Trainer:
    """One gradient step on a batch from replay."""

    def __init__(self, hyper: DQN, spec: Spec) -> None:
        self._hyper, self._device, self._team = hyper, spec.device, spec.team
        self._online = _module(hyper, spec)
        networks.initialise(self._online, generator(spec.seed, "init"), 2**0.5, last=1.0)
        self._online.to(spec.device)
        self._target = copy.deepcopy(self._online)
        self._optimizer = Optimizer(
            {"q": self._online},
            hyper.max_grad_norm,
            team=spec.team,
            shared=spec.shared,
            gradients=spec.gradients,
        )
        self._target_flat = Flat({"target": self._target})
        self._params = Params(_shapes(self._online))
        rungs = [hyper.rung(replace(spec, actor=i)) or 0.0 for i in range(spec.actors)]
        self._ladder = sum(rungs) / len(rungs)
        """mean share of random actions of actors on a ladder; 0: there is none"""
        self._updates = 0
        self._part: Rollout | None = None
        self._error: Callable[[Tensor, Tensor], Tensor] = (
            functional.smooth_l1_loss if hyper.loss == "huber" else functional.mse_loss
        )

    def take(self, part: Rollout) -> None:
        self._optimizer.refresh()
        self._part = part

    def finish(self) -> Metrics:
        assert self._part is not None
        loss, value = self._loss(self._part)
        rows = self._part.valid.size  # replay draws valid steps only
        norm = self._optimizer.step(loss, self._hyper.learning_rate, rows)
        self._updates += 1
        self._follow()
        told = torch.stack([loss.detach(), value, norm]).unsqueeze(0)
        (told,) = mean_over(self._team, told, [rows])
        return dict(zip(("loss", "q_mean", "grad_norm"), told.tolist(), strict=True)) | {
            "learning_rate": self._hyper.learning_rate,
            "epsilon": self._ladder or self._hyper.epsilon(self._updates),
        }

    def params(self, version: int) -> Params:
        np.copyto(self._params.flat[:-1], self._optimizer.flat.array())
        self._params["epsilon"][...] = self._hyper.epsilon(version)
        return self._params

    def finite(self) -> bool:
        return self._optimizer.finite()

    def networks(self) -> Leaves:
        return self._optimizer.flat.arrays() | self._target_flat.arrays()

    def load_networks(self, arrays: Mapping[str, Array]) -> None:
        self._optimizer.flat.load(arrays)
        self._target_flat.load(arrays)

    def fates(self) -> Mapping[str, Fate]:
        fates: dict[str, Fate] = dict.fromkeys(self.networks(), "averaged")
        return fates | Optimizer.fates

    def state(self) -> State:
        return {
            "optimizer": self._optimizer.state(),
            "target": self._target_flat.copies(),
            "updates": self._updates,
        }

    def load_state(self, state: State) -> None:
        self._optimizer.load_state(state["optimizer"])
        self._target_flat.load(state["target"])
        self._updates = state["updates"]

    def _loss(self, part: Rollout) -> tuple[Tensor, Tensor]:
        """The temporal-difference loss, and the mean value of the actions taken."""
        tensor = self._tensor
        now, then = tensor(part.observation["obs"])  # each [N, ...]
        action, reward = tensor(part.action)[0], tensor(part.reward)[0]
        discount = tensor(part.extras["discount"])[0]
        with torch.no_grad():
            values = self._values(self._target, then)
            if self._hyper.double:
                best = self._values(self._online, then).argmax(-1, keepdim=True)
                following = values.gather(-1, best).squeeze(-1)
            else:
                following = values.amax(-1)
            target = reward + discount * following
        value = self._values(self._online, now).gather(-1, action.unsqueeze(-1)).squeeze(-1)
        return self._error(value, target), value.detach().mean()

    def _values(self, network: nn.Module, observation: Tensor) -> Tensor:
        output: Tensor = network(observation)
        if not self._hyper.dueling:
            return output
        advantage = output[..., :-1]
        return output[..., -1:] + advantage - advantage.mean(-1, keepdim=True)

    def _follow(self) -> None:
        """Move the target network towards the online one."""
        if self._hyper.target_every == 0:
            self._target_flat.data.lerp_(self._optimizer.flat.data, self._hyper.tau)
        elif self._updates % self._hyper.target_every == 0:
            self._target_flat.data.copy_(self._optimizer.flat.data)

    def _tensor(self, array: Array) -> Tensor:
        return torch.from_numpy(array).to(self._device)
