"""Proximal policy optimization (Schulman et al. 2017), with generalised advantage estimation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from tianji import networks, returns
from tianji.algorithm import (
    Bound,
    Count,
    Decision,
    Fate,
    Fraction,
    Lanes,
    Metrics,
    NotNegative,
    Positive,
    Spec,
)
from tianji.distributions import Distribution, distribution
from tianji.errors import Refusal
from tianji.moments import Moments
from tianji.optim import Optimizer, mean_over, spread
from tianji.role import State, generator, generator_state, load_generator_state
from tianji.store import Fresh
from tianji.types import GAP, Array, Layout, Leaves, Params, Rollout, leaf

Shapes = dict[str, tuple[int, ...]]

FAR = 10.0
"""normalised observations and rewards are cut at this many standard deviations"""

CHUNK = 4096
"""rows whose values are computed at once"""


@dataclass(frozen=True)
class PPO:
    """On-policy; each rollout is consumed by one update of several epochs."""

    name: ClassVar[str] = "ppo"
    on_policy: ClassVar[bool] = True
    corrects: ClassVar[tuple[str, ...]] = ("vtrace",)

    learning_rate: Positive = 3e-4
    """Adam's step size"""
    schedule: Literal["constant", "linear"] = "constant"
    """of the learning rate; linear: to 0 at stop.steps or stop.updates"""
    gamma: Fraction = 0.99
    """discount per step"""
    lam: Fraction = 0.95
    """lambda of the advantage estimate or of V-trace: 0 one-step, 1 Monte Carlo"""
    epochs: Count = 10
    """passes over the batch in one update"""
    minibatches: Count = 4
    """parts into which each pass splits the batch, one optimizer step each"""
    clip: Positive = 0.2
    """how far the probability ratio may move the objective"""
    value_clip: NotNegative = 0.0
    """how far a value may move from the old one; 0: freely"""
    value_coef: NotNegative = 0.5
    """weight of the value loss"""
    entropy_coef: NotNegative = 0.0
    """weight of the entropy bonus"""
    max_grad_norm: NotNegative = 0.5
    """the gradient is scaled down to this norm; 0: never"""
    normalise_advantage: bool = True
    """scale each batch's advantages to mean 0 and variance 1"""
    normalise_observation: bool = False
    """scale observations by their running mean and variance"""
    normalise_reward: bool = False
    """scale rewards by the running deviation of the discounted return"""
    log_std: Annotated[float, Bound(-10, 5)] = 0.0
    """log of the deviation of continuous actions at the start"""

    @property
    def uses_end(self) -> bool:
        """Does what is learnt depend on when the run ends?"""
        return self.schedule == "linear"

    def check(self, spec: Spec) -> None:
        rows = self.steps_per_update(spec) // spec.learners
        if self.minibatches > rows:
            raise Refusal(
                f"algorithm.minibatches = {self.minibatches} exceeds the batch of {rows} steps "
                f"(actors x envs_per_actor x rollout_length / learners), so some would be empty. "
                f"Set it to {rows} or less."
            )
        if self.normalise_reward and spec.learners > 1:
            raise Refusal(
                f"algorithm.normalise_reward follows each env's return from rollout to rollout; "
                f"with scale.learners = {spec.learners} no learner sees all of an env's, so the "
                f"scale would be wrong. Set normalise_reward = false, or scale.learners = 1."
            )
        if self.normalise_reward and spec.window > 1:
            raise Refusal(
                f"algorithm.normalise_reward follows each env's return from rollout to rollout; "
                f"reuse.window = {spec.window} mixes old and new ones, so the scale would be "
                f"wrong. Set normalise_reward = false, or reuse.window = 1."
            )
        if self.normalise_reward and spec.sends_early:
            raise Refusal(
                "algorithm.normalise_reward follows each env's return from rollout to rollout; "
                "with relax.send_when a rollout that is sent early looks like an episode's end, so "
                "the scale would be wrong. Set normalise_reward = false, or leave send_when out."
            )
        if spec.join == "hogwild" and (self.normalise_observation or self.normalise_reward):
            raise Refusal(
                'relax.join = "hogwild" shares parameters, not what normalises their inputs: '
                "workers would step one network by differently scaled inputs. Set "
                "algorithm.normalise_observation and normalise_reward to false, or scale.relax = "
                '"gala".'
            )
        if self.schedule == "linear" and spec.updates is None and spec.steps is None:
            raise Refusal(
                'algorithm.schedule = "linear" without an end never moves. Set stop.steps or '
                'stop.updates, or schedule = "constant".'
            )

    def steps_per_update(self, spec: Spec) -> int:
        return spec.actors * spec.rows_per_rollout

    def warmup_steps(self, spec: Spec) -> int:
        return 0

    def slots(self, spec: Spec) -> int:
        return 1

    def policy(self, spec: Spec) -> Policy:
        return Policy(self, spec)

    def store(self, spec: Spec, lanes: Lanes) -> Fresh:
        return Fresh(lanes, rollouts=spec.actors)

    def trainer(self, spec: Spec) -> Trainer:
        return Trainer(self, spec)


def _modules(spec: Spec, over: Distribution) -> dict[str, nn.Module]:
    """The policy network and the value network."""
    observation = spec.env.observation["obs"]
    policy, value = networks.build(spec.network, observation, over.width, 1)
    return {"policy": policy, "value": value}


def _shapes(hyper: PPO, spec: Spec, policy: nn.Module, over: Distribution) -> Shapes:
    """What a snapshot holds."""
    shapes = networks.shapes({"policy": policy}) | over.shapes
    if hyper.normalise_observation:
        shape = spec.env.observation["obs"].shape
        shapes |= {"obs.mean": shape, "obs.scale": shape}
    return shapes


class Policy:
    """Normalise, ask the network, draw."""

    extras: ClassVar[Layout] = {"log_prob": leaf((), np.float32)}

    def __init__(self, hyper: PPO, spec: Spec) -> None:
        observation = spec.env.observation["obs"]
        self._over = distribution(spec.env.action)
        module = _modules(spec, self._over)["policy"]
        self._network = networks.inference(spec.network, observation, module, "policy")
        self._normalise = hyper.normalise_observation
        self.shapes = _shapes(hyper, spec, module, self._over)
        self._params: Mapping[str, Array] = {}

    def initial(self, B: int) -> Leaves:
        return {}

    def load(self, params: Params) -> None:
        self._params = params
        self._network.load(params)

    def act(self, observation: Leaves, state: Leaves, rng: np.random.Generator | None) -> Decision:
        obs = observation["obs"]
        if self._normalise:
            obs = _normalised(obs, self._params["obs.mean"], self._params["obs.scale"])
        output = self._network(obs)
        if rng is None:
            return Decision(self._over.greedy(output), state, {})
        action, log_prob = self._over.sample(output, self._params, rng)
        return Decision(action, state, {"log_prob": log_prob})


def _normalised(x: Array, mean: Array | np.float32, scale: Array) -> Array:
    return np.clip((x - mean) * scale, -FAR, FAR, dtype=np.float32)  # type: ignore[no-any-return]


class Trainer:
    """Advantages are estimated as parts arrive; the epochs follow when all are there."""

    def __init__(self, hyper: PPO, spec: Spec) -> None:
        self._hyper, self._spec = hyper, spec
        self._over = distribution(spec.env.action)
        modules = _modules(spec, self._over)
        rng = generator(spec.seed, "init")
        networks.initialise(modules["policy"], rng, 2**0.5, last=0.01)
        networks.initialise(modules["value"], rng, 2**0.5, last=1.0)
        self._extra: dict[str, Tensor] = {}
        if self._over.shapes:
            start = torch.full(self._over.shapes["log_std"], hyper.log_std, device=spec.device)
            self._extra["log_std"] = nn.Parameter(start)
            modules["spread"] = nn.ParameterDict(self._extra)
        for module in modules.values():
            module.to(spec.device)
        self._policy, self._value = modules["policy"], modules["value"]

        self._team = spec.team
        self._optimizer = Optimizer(
            modules, hyper.max_grad_norm, eps=1e-5, team=spec.team, shared=spec.shared
        )
        self._updates = 0
        self._steps = 0
        """valid steps of the updates so far, for the schedule"""
        self._rng = generator(spec.seed, "learner", spec.index("learner", spec.learner))
        self._obs = Moments(spec.env.observation["obs"].shape)
        self._return = Moments(())
        self._running = np.zeros((spec.actors, spec.envs), np.float32)
        """discounted return so far, of each env"""
        self._params = Params(_shapes(hyper, spec, self._policy, self._over))
        self._parts: list[dict[str, Tensor]] = []
        self._seen: list[Array] = []

    def take(self, part: Rollout) -> None:
        hyper = self._hyper
        if not self._parts:
            self._optimizer.refresh()
        raw = part.observation["obs"]
        obs = raw
        if hyper.normalise_observation:
            self._seen.append(raw[:-1][part.valid])
            mean, scale = self._obs.mean.astype(np.float32), self._obs.scale()
            obs = _normalised(raw, mean, scale)
        observation = torch.from_numpy(obs).to(self._spec.device)
        with torch.no_grad():
            rows = torch.split(observation.flatten(0, 1), CHUNK)
            value = torch.cat([self._value(x) for x in rows]).view(obs.shape[:2]).cpu().numpy()
        reward = self._rewards(part) if hyper.normalise_reward else part.reward
        log_prob = part.extras["log_prob"]
        estimate = reward, value, part.terminated, part.valid, hyper.gamma, hyper.lam
        if self._spec.correct == "vtrace":
            # What this update begins with corrects for what acted, and anchors the ratio.
            now = self._log_prob(observation[:-1], part.action)
            target, advantage = returns.vtrace(now - log_prob, *estimate)
            weight = np.exp(np.minimum(now - log_prob, 0))
            log_prob = now
        else:
            advantage = returns.gae(*estimate)
            target = advantage + value[:-1]
        valid = torch.from_numpy(np.flatnonzero(part.valid)).to(self._spec.device)
        columns = {
            "action": part.action,
            "log_prob": log_prob,
            "advantage": advantage,
            "value": value[:-1],
            "target": target,
        }
        if self._spec.correct == "vtrace":
            columns["weight"] = weight
        tensors = {k: torch.from_numpy(v).to(self._spec.device) for k, v in columns.items()}
        tensors["obs"] = observation[:-1]
        self._parts.append({k: v.flatten(0, 1)[valid] for k, v in tensors.items()})

    def finish(self) -> Metrics:
        hyper = self._hyper
        batch = {k: torch.cat([part[k] for part in self._parts]) for k in self._parts[0]}
        target, advantage = batch["target"], batch["advantage"]
        weight = batch.get("weight")
        # V-trace's weights are taken out for it. With them in, what the policy would hardly do has
        # advantage 0, falls below the mean, and is unlearnt without a reason.
        plain = advantage if weight is None else torch.where(weight > 0, advantage / weight, 0.0)
        rows, ((mean, deviation), *of_targets) = spread(
            self._team, plain, target, target - batch["value"]
        )
        if hyper.normalise_advantage and rows > 0:
            plain = (plain - mean) / (deviation + 1e-8)
            batch["advantage"] = plain if weight is None else weight * plain
        rate = self._learning_rate()
        metrics = self._epochs(batch, rate)
        self._updates += 1
        self._steps += rows
        self._observe()
        self._parts, self._seen = [], []
        explained = _explained_variance(*(deviation for _, deviation in of_targets))
        return metrics | {"learning_rate": rate, "explained_variance": explained}

    def params(self, version: int) -> Params:
        for name, array in self._optimizer.flat.arrays().items():
            name = name.removeprefix("spread.")
            if name in self._params:
                np.copyto(self._params[name], array)
        if self._hyper.normalise_observation:
            np.copyto(self._params["obs.mean"], self._obs.mean, casting="same_kind")
            np.copyto(self._params["obs.scale"], self._obs.scale())
        return self._params

    def finite(self) -> bool:
        return self._optimizer.finite()

    def networks(self) -> Leaves:
        moments = {"obs": self._obs, "return": self._return}
        extra = {f"{k}.{name}": a for k, m in moments.items() for name, a in m.arrays().items()}
        return self._optimizer.flat.arrays() | extra

    def load_networks(self, arrays: Mapping[str, Array]) -> None:
        self._optimizer.flat.load(arrays)
        for prefix, moments in (("obs", self._obs), ("return", self._return)):
            moments.load({name: arrays[f"{prefix}.{name}"] for name in moments.arrays()})

    def fates(self) -> Mapping[str, Fate]:
        # A normaliser's scale goes with the networks that were trained at it; its count says how
        # fast it moves, and that is each group's own.
        fates: dict[str, Fate] = dict.fromkeys(self.networks(), "averaged")
        return fates | {"obs.count": "local", "return.count": "local"} | Optimizer.fates

    def state(self) -> State:
        return {
            "optimizer": self._optimizer.state(),
            "updates": self._updates,
            "steps": self._steps,
            "obs": self._obs.arrays(),
            "return": self._return.arrays(),
            "running": self._running.copy(),
            "rng": generator_state(self._rng),
        }

    def load_state(self, state: State) -> None:
        self._optimizer.load_state(state["optimizer"])
        self._updates, self._steps = state["updates"], state["steps"]
        self._obs.load(state["obs"])
        self._return.load(state["return"])
        self._running[:] = state["running"]
        load_generator_state(self._rng, state["rng"])

    def _log_prob(self, observation: Tensor, action: Array) -> Array:
        """Of actions [T, B], by the policy as it is."""
        taken = torch.from_numpy(action).to(self._spec.device).flatten(0, 1)
        rows = zip(
            torch.split(observation.flatten(0, 1), CHUNK), torch.split(taken, CHUNK), strict=True
        )
        with torch.no_grad():
            found = [
                self._over.evaluate(self._policy(x), self._extra, a, False)[0] for x, a in rows
            ]
        log_prob: Array = torch.cat(found).view(action.shape[:2]).cpu().numpy()
        return log_prob

    def _epochs(self, batch: dict[str, Tensor], rate: float) -> Metrics:
        """All optimizer steps of an update; what the last pass over the batch was like."""
        names = ("loss", "policy_gradient_loss", "value_loss", "entropy_loss", "approx_kl",
                 "clip_fraction", "grad_norm")  # fmt: skip
        told: list[Tensor] = []
        counts: list[int] = []
        for epoch in range(self._hyper.epochs):
            last = epoch == self._hyper.epochs - 1
            for minibatch in self._minibatches(batch):
                rows = len(minibatch["advantage"])
                # Without a row there is nothing to learn from, but other learners may have some.
                loss, parts = self._loss(minibatch, tell=last) if rows else (None, [])
                norm = self._optimizer.step(loss, rate, rows)
                if last:
                    values = [norm] * len(names) if loss is None else [loss.detach(), *parts, norm]
                    told.append(torch.stack(values))
                    counts.append(rows)
        means = mean_over(self._team, torch.stack(told), counts)
        if not len(means):  # every row only reset its env
            return dict.fromkeys(names, 0.0)
        return dict(zip(names, means.mean(0).tolist(), strict=True))

    def _observe(self) -> None:
        """Join what was observed into the moments, for the next update."""
        if self._team.size > 1 and self._hyper.normalise_observation:
            self._obs.update_together(self._team, self._seen)
            return
        for rows in self._seen:
            self._obs.update(rows)

    def _learning_rate(self) -> float:
        hyper, spec = self._hyper, self._spec
        if hyper.schedule == "constant":
            return hyper.learning_rate
        done = self._updates * spec.groups / spec.updates if spec.updates else 0.0
        # A run's steps are those of all groups.
        done = max(done, self._steps * spec.groups / spec.steps if spec.steps else 0.0)
        return hyper.learning_rate * max(0.0, 1.0 - done)

    def _rewards(self, part: Rollout) -> Array:
        """Rewards over the deviation of the discounted return, as it was before this part."""
        scale = self._return.scale()
        if part.head[GAP]:
            self._running[part.source] = 0.0
        ended = part.terminated | ~part.valid
        running, self._running[part.source] = returns.discounted(
            part.reward, ended, self._running[part.source], self._hyper.gamma
        )
        self._return.update(running[part.valid])
        return _normalised(part.reward, np.float32(0.0), scale)

    def _minibatches(self, batch: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        N = len(batch["advantage"])
        order = torch.from_numpy(self._rng.permutation(N)).to(self._spec.device)
        shuffled = {k: v.index_select(0, order) for k, v in batch.items()}
        cuts = [N * i // self._hyper.minibatches for i in range(self._hyper.minibatches + 1)]
        for begin, end in itertools.pairwise(cuts):
            yield {k: v[begin:end] for k, v in shuffled.items()}

    def _loss(self, batch: dict[str, Tensor], tell: bool) -> tuple[Tensor, list[Tensor]]:
        hyper, obs, advantage = self._hyper, batch["obs"], batch["advantage"]
        output, value = networks.together(obs, self._policy, self._value)
        log_prob, entropy = self._over.evaluate(
            output, self._extra, batch["action"], tell or hyper.entropy_coef > 0
        )
        log_ratio = log_prob - batch["log_prob"]
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - hyper.clip, 1 + hyper.clip)
        policy_loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()
        value, target = value.squeeze(-1), batch["target"]
        value_loss = (value - target).square()
        if hyper.value_clip > 0:
            near = (value - batch["value"]).clamp(-hyper.value_clip, hyper.value_clip)
            value_loss = torch.maximum(value_loss, (batch["value"] + near - target).square())
        value_loss = value_loss.mean()
        loss = policy_loss + hyper.value_coef * value_loss
        if entropy is not None:
            loss = loss - hyper.entropy_coef * entropy.mean()
        if entropy is None or not tell:
            return loss, []
        with torch.no_grad():
            kl = (ratio - 1 - log_ratio).mean()
            cut = ((ratio - 1).abs() > hyper.clip).float().mean()
            return loss, [policy_loss.detach(), value_loss.detach(), -entropy.mean(), kl, cut]


def _explained_variance(target: Tensor, error: Tensor) -> float:
    """By the deviations of the returns, and of what values left of them unexplained. 1: values
    foretell the returns; 0: no better than their mean."""
    variance = float(target.square())
    return 0.0 if variance < 1e-12 else 1.0 - float(error.square()) / variance
