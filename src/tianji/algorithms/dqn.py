"""Deep Q-learning (Mnih et al. 2015) and its family: double, dueling, n-step, prioritised replay,
noisy networks, and distributions of returns instead of values (C51, QR)."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from tianji import networks, off_policy
from tianji.algorithm import (
    Chooser,
    Count,
    Decision,
    Fraction,
    Gatherer,
    Lanes,
    Metrics,
    NotNegative,
    Positive,
    Spec,
    Traits,
    Whole,
)
from tianji.description import Description
from tianji.env import Discrete
from tianji.errors import Refusal
from tianji.off_policy import Networks, OffPolicy
from tianji.prioritized import RECORDED, Prioritized, WeightedTransitions, weights
from tianji.recorded import Recorded, Tensors
from tianji.role import generator
from tianji.types import Array, Leaves, Params, Rollout


@dataclass(frozen=True)
class DQN(OffPolicy):
    """Off-policy, for discrete actions; batches are drawn from replay."""

    name: ClassVar[str] = "dqn"
    traits: ClassVar[Traits] = replace(OffPolicy.traits, explores=("ladder",))

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
    prioritized: bool = False
    """steps are drawn by how large their error was, not uniformly"""
    alpha: Fraction = 0.6
    """exponent of priorities; 0: all steps are alike"""
    beta: Fraction = 0.4
    """share of the bias of priorities that weights take away at the start"""
    beta_updates: Whole = 100_000
    """updates over which beta becomes 1; 0: it stays"""
    initial: Literal["actor", "max"] = "actor"
    """a new step's priority: the error that its actor saw, or the largest so far"""
    noisy: bool = False
    """explore by noise on the weights, whose size is learnt, instead of random actions"""
    sigma: NotNegative = 0.5
    """deviation of that noise at the start, over the square root of a layer's inputs"""
    distribution: Literal["none", "c51", "qr"] = "none"
    """learn values, or the returns' distribution: by shares of fixed atoms, or by quantiles"""
    atoms: Count = 51
    """atoms of c51, quantiles of qr"""
    v_min: float = -10.0
    """the least return that c51 knows"""
    v_max: float = 10.0
    """the largest return that c51 knows"""
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
        if spec.env.agents:
            raise Refusal(
                f"dqn acts for one agent; {spec.env.id} has {len(spec.env.agents)}, of which it "
                f"would move none but the first. Set algorithm.name to one for several agents: "
                f"tianji list names them."
            )
        self._check_unused()
        # The value that follows a window is recorded one row later.
        self.check_replay(spec, self.n_step + self._records)
        if self.distribution == "c51" and (self.v_min >= self.v_max or self.atoms < 2):
            raise Refusal(
                f"algorithm.v_min = {self.v_min:g}, v_max = {self.v_max:g} and atoms = "
                f"{self.atoms} leave c51 no room for a distribution. Set v_min below v_max, and "
                f"atoms to 2 or more."
            )
        if self.noisy and spec.explore == "ladder":
            raise Refusal(
                'relax.explore = "ladder" gives each actor its own share of random actions, and '
                "algorithm.noisy = true takes none, so all would explore alike. Set "
                'algorithm.noisy = false, or relax.explore = "alike".'
            )

    def make_networks(self, spec: Spec) -> Networks:
        online = {"q": _module(self, spec)}
        return Networks({"q": online}, {"q": {"target": online["q"]}}, online, "epsilon")

    def describe(self, spec: Spec) -> Description:
        found = super().describe(spec)
        if not self.prioritized:
            return found
        return replace(
            found,
            selection=found.selection | weights(self.batch_size),
            extras=RECORDED if self._records else {},
            prioritizes=True,
        )

    def policy(self, spec: Spec, device: str = "cpu") -> Policy:
        return Policy(self, spec)

    def chooser(self, spec: Spec, lanes: Lanes) -> Chooser:
        if not self.prioritized:
            return super().chooser(spec, lanes)
        slots, gamma, n = self.slots(spec), self.gamma, self.n_step
        schedule = self.alpha, self.beta, self.beta_updates
        return Prioritized(lanes, self.batch_size, slots, gamma, n, *schedule, self.initial)

    def gatherer(self, spec: Spec, lanes: Lanes) -> Gatherer:
        if not self.prioritized:
            return super().gatherer(spec, lanes)
        return WeightedTransitions(lanes, self.gamma, self.n_step)

    def trainer(self, spec: Spec, device: str = "cpu") -> Trainer:
        return Trainer(self, spec, device)

    @property
    def _records(self) -> bool:
        """Does the policy record values, for first priorities?"""
        return self.prioritized and self.initial == "actor"

    def _check_unused(self) -> None:
        """Refuse what is set and would do nothing."""
        default = {field.name: field.default for field in fields(self)}
        priorities = "alpha", "beta", "beta_updates", "initial"
        epsilon = "epsilon_start", "epsilon_end", "epsilon_steps"
        for used, by, keys in (
            (self.prioritized, "prioritized = true", priorities),
            (not self.noisy, "noisy = false", epsilon),
            (self.noisy, "noisy = true", ("sigma",)),
            (self.distribution != "none", 'distribution = "c51" or "qr"', ("atoms",)),
            (self.distribution == "c51", 'distribution = "c51"', ("v_min", "v_max")),
            (self.distribution == "none", 'distribution = "none"', ("loss",)),
        ):
            for key in keys:
                if not used and getattr(self, key) != default[key]:
                    raise Refusal(
                        f"algorithm.{key} = {getattr(self, key)} would do nothing without "
                        f"algorithm.{by}. Set that, or leave {key} out."
                    )

    def rung(self, spec: Spec) -> float | None:
        """The constant share of random actions of one actor on Ape-X's ladder (Horgan et al. 2018);
        None: the schedule holds."""
        if spec.explore != "ladder" or spec.actor is None:
            return None
        return float(0.4 ** (1 + 7 * spec.actor / max(1, spec.actors - 1)))

    def epsilon(self, version: int) -> float:
        """By the env steps that a policy version stands for."""
        if self.noisy:
            return 0.0
        return self._between(self.epsilon_start, self.epsilon_end, version, self.epsilon_steps)


def _module(hyper: DQN, spec: Spec) -> nn.Module:
    """Values of the n actions; dueling: their advantages and the state's value, n + 1 outputs. Of a
    distribution, each of them is one number for each atom."""
    assert isinstance(spec.env.action, Discrete)
    observation = spec.env.observation["obs"]
    atoms = 1 if hyper.distribution == "none" else hyper.atoms
    outputs = (spec.env.action.n + hyper.dueling) * atoms
    if hyper.noisy:
        return networks.Noisy(spec.network, observation, outputs, hyper.sigma)
    (module,) = networks.build(spec.network, observation, outputs)
    return module


def support(hyper: DQN) -> Array:
    """[atoms]: the returns that c51 gives shares to."""
    return np.linspace(hyper.v_min, hyper.v_max, hyper.atoms, dtype=np.float32)


class Policy:
    """The best action, or with probability epsilon any; of the legal ones, if there is a mask."""

    def __init__(self, hyper: DQN, spec: Spec) -> None:
        assert isinstance(spec.env.action, Discrete)
        self._hyper = hyper
        module = _module(hyper, spec)
        observation = spec.env.observation["obs"]
        self._network: networks.Inference | networks.NoisyInference
        if isinstance(module, networks.Noisy):
            self._network = networks.NoisyInference(spec.network, observation, module, "q")
        else:
            self._network = networks.inference(spec.network, observation, module, "q")
        self._actions = spec.env.action.n
        self._support = support(hyper)
        self._epsilon = 1.0
        self._rung = hyper.rung(spec)
        self._records = hyper._records

    def initial(self, B: int) -> Leaves:
        return {}

    def load(self, params: Params) -> None:
        self._network.load(params)
        self._epsilon = float(params["epsilon"]) if self._rung is None else self._rung

    def act(self, observation: Leaves, state: Leaves, rng: np.random.Generator | None) -> Decision:
        value, mask = self._values(observation["obs"], rng), observation.get("mask")
        legal = value if mask is None else np.where(mask, value, -np.inf)
        action: Array = legal.argmax(axis=1)
        if rng is not None and not self._hyper.noisy:
            any_action = self._any(len(action), mask, rng)
            explore = rng.random(len(action)) < self._epsilon
            action = np.where(explore, any_action, action)
        if not self._records:
            return Decision(action, state, {})
        rows = np.arange(len(action))
        best = legal.max(axis=1)
        # An episode's last observation may have no legal action.
        extras = {"q": value[rows, action], "q_best": np.where(np.isfinite(best), best, 0)}
        return Decision(action, state, extras)

    def _any(self, B: int, mask: Array | None, rng: np.random.Generator) -> Array:
        if mask is None:
            return rng.integers(self._actions, size=B)
        which = (rng.random(B) * mask.sum(axis=1)).astype(np.int64)  # the how-manieth legal one
        any_action: Array = (mask.cumsum(axis=1) > which[:, None]).argmax(axis=1)
        return any_action

    def _values(self, observation: Array, rng: np.random.Generator | None) -> Array:
        """[B, n]: expected returns; without what is the same for all actions, if nobody asks."""
        hyper, n = self._hyper, self._actions
        output: Array
        if isinstance(self._network, networks.NoisyInference):
            output = self._network(observation, rng)
        else:
            output = self._network(observation)
        if hyper.distribution == "none" and not (hyper.dueling and self._records):
            return output[:, :n]
        output = output.reshape(len(output), n + hyper.dueling, -1)
        if hyper.dueling:
            advantage = output[:, :-1]
            output = output[:, -1:] + advantage - advantage.mean(axis=1, keepdims=True)
        if hyper.distribution != "c51":
            values: Array = output.mean(axis=-1)
            return values
        share = np.exp(output - output.max(axis=-1, keepdims=True))
        mean: Array = share @ self._support / share.sum(axis=-1)
        return mean


def project(share: Tensor, atoms: Tensor, reward: Tensor, discount: Tensor) -> Tensor:
    """[N, atoms]: the distribution of r + discount z, with shares [N, atoms] of z at the atoms, on
    the atoms again (Bellemare et al. 2017, eq. 7): each z goes to its neighbours by distance."""
    z = reward.unsqueeze(-1) + discount.unsqueeze(-1) * atoms
    z = z.clamp(atoms[0], atoms[-1])
    near = 1 - (z.unsqueeze(-1) - atoms).abs() * ((len(atoms) - 1) / (atoms[-1] - atoms[0]))
    return torch.bmm(share.unsqueeze(1), near.clamp_(min=0)).squeeze(1)


def quantile_huber(quantiles: Tensor, target: Tensor) -> Tensor:
    """[N]: sum over the quantiles [N, k], mean over samples [N, m] of the target, of
    |tau - (u < 0)| Huber(u), u = target - quantile (Dabney et al. 2018, eq. 10)."""
    k = quantiles.shape[1]
    tau = (torch.arange(k, device=quantiles.device) + 0.5) / k
    u = target.unsqueeze(1) - quantiles.unsqueeze(2)  # [N, k, m]
    size = u.detach().abs()
    huber = torch.where(size <= 1, 0.5 * u * u, u.abs() - 0.5)
    weight = (tau.unsqueeze(-1) - (u.detach() < 0).float()).abs()
    return (weight * huber).mean(2).sum(1)


class Trainer(off_policy.Trainer):
    """One gradient step on a batch from replay."""

    def __init__(self, hyper: DQN, spec: Spec, device: str = "cpu") -> None:
        self._hyper = hyper
        made = hyper.make_networks(spec)
        self._online = made.acting["q"]
        networks.initialise(self._online, generator(spec.seed, "init"), 2**0.5, last=1.0)
        super().__init__(hyper, spec, device, made)
        self._target = self._copies["q"]["target"]
        self._optimizer = self._optimizers["q"]
        self._support = torch.from_numpy(support(hyper)).to(device)
        rungs = [hyper.rung(replace(spec, actor=i)) or 0.0 for i in range(spec.actors)]
        self._ladder = sum(rungs) / len(rungs)
        """mean share of random actions of actors on a ladder; 0: there is none"""
        self._priority: Tensor | None = None
        """of the last update's steps"""
        records = self._optimizer.repeats and not hyper.noisy
        self._step = Recorded(self._update, device, records)

    def priorities(self) -> Array:
        assert self._priority is not None
        return self._priority.cpu().numpy()

    def _learn(self, part: Rollout) -> Metrics:
        told, self._priority = self._step(_arrays(part))
        self._follow(self._hyper.target_every, self._hyper.tau)
        rows = part.valid.size  # replay draws valid steps only
        return self._means(("loss", "q_mean", "grad_norm"), told, rows) | {
            "learning_rate": self._hyper.learning_rate,
            "epsilon": self._ladder or self._scalar(self._updates),
        }

    def _scalar(self, version: int) -> float:
        return self._hyper.epsilon(version * self._spec.groups)

    def _update(self, batch: Tensors) -> tuple[Tensor, Tensor]:
        """One step down the gradient. [3]: the loss, the mean value of the actions taken, the
        gradient's norm; [N]: what the batch's steps are worth."""
        loss, value, priority = self._loss(batch)
        norm = self._optimizer.step(loss, self._hyper.learning_rate, len(priority))
        return torch.stack([loss.detach(), value, norm]), priority

    def _loss(self, batch: Tensors) -> tuple[Tensor, Tensor, Tensor]:
        """The loss, the mean value of the actions taken, and [N] what the steps are worth."""
        hyper = self._hyper
        now, then = batch["obs"]  # each [N, ...]
        action, reward, discount = (batch[name][0] for name in ("action", "reward", "discount"))
        with torch.no_grad():
            following = self._atoms(self._target, then)  # [N, n, atoms]
            chooser = self._atoms(self._online, then) if hyper.double else following
            value = self._mean(chooser)
            if "mask" in batch:
                legal = batch["mask"][1]
                value = value.masked_fill(~legal, -torch.inf)
                # An episode's last observation may have no legal action, and then no value.
                discount = torch.where(legal.any(-1), discount, 0.0)
            following = _of(following, value.argmax(-1))
        taken = _of(self._atoms(self._online, now), action)  # [N, atoms]
        error, priority = self._errors(taken, following, reward, discount)
        if hyper.prioritized:
            error = error * batch["weight"][0]
        return error.mean(), self._mean(taken.detach()).mean(), priority

    def _errors(
        self, taken: Tensor, following: Tensor, reward: Tensor, discount: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Each [N]: what is made small, and how far off the steps' values were."""
        if self._hyper.distribution == "c51":
            with torch.no_grad():
                target = project(following.softmax(-1), self._support, reward, discount)
            cross = -(target * taken.log_softmax(-1)).sum(-1)
            # Less what even the right distribution has: the Kullback-Leibler divergence.
            least = -torch.xlogy(target, target).sum(-1)
            return cross, (cross.detach() - least).clamp(min=0)
        target = reward.unsqueeze(-1) + discount.unsqueeze(-1) * following
        if self._hyper.distribution == "qr":
            return quantile_huber(taken, target), (target - taken.detach()).mean(-1).abs()
        loss = functional.smooth_l1_loss if self._hyper.loss == "huber" else functional.mse_loss
        error = loss(taken, target, reduction="none").squeeze(-1)
        return error, (target - taken.detach()).squeeze(-1).abs()

    def _atoms(self, network: nn.Module, observation: Tensor) -> Tensor:
        """[N, n, atoms]: values, quantiles, or the logarithms of atoms' shares."""
        output: Tensor
        if isinstance(network, networks.Noisy):
            output = network(observation, self._rng)
        else:
            output = network(observation)
        atoms = 1 if self._hyper.distribution == "none" else self._hyper.atoms
        output = output.view(len(output), -1, atoms)
        if not self._hyper.dueling:
            return output
        advantage = output[:, :-1]
        return output[:, -1:] + advantage - advantage.mean(1, keepdim=True)

    def _mean(self, atoms: Tensor) -> Tensor:
        """Expected values."""
        if self._hyper.distribution == "c51":
            return torch.matmul(atoms.softmax(-1), self._support)
        return atoms.mean(-1) if self._hyper.distribution == "qr" else atoms.squeeze(-1)

    def _values(self, network: nn.Module, observation: Tensor) -> Tensor:
        """[N, n]"""
        return self._mean(self._atoms(network, observation))


def _of(atoms: Tensor, action: Tensor) -> Tensor:
    """[N, atoms]: those of one action each."""
    return atoms.gather(1, action.view(-1, 1, 1).expand(-1, 1, atoms.shape[-1])).squeeze(1)


def _arrays(part: Rollout) -> Leaves:
    """What an update reads of a batch."""
    arrays = {"obs": part.observation["obs"], "action": part.action, "reward": part.reward}
    arrays |= {name: part.extras[name] for name in ("discount", "weight") if name in part.extras}
    return arrays | {name: part.observation[name] for name in ("mask",) if name in part.observation}
