"""What on-policy algorithms are made of: a policy, a trainer, and what both see of an env.

An algorithm has hyperparameters (`OnPolicy` and its own), an estimate (`Trainer._estimate`) and an
objective (`Trainer._objective`). Several agents are columns beside each other: from here on, an env
of A agents is A envs. A network with a memory is unrolled over whole rollouts, so that minibatches
are of columns, not of rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tianji import corrections, networks, returns
from tianji.algorithm import (
    Bound,
    Chooser,
    Decision,
    Fraction,
    Gatherer,
    Lanes,
    Metrics,
    NotNegative,
    Positive,
    Spec,
    Traits,
)
from tianji.columns import Each, ask, chunked, fold, initialise, make_modules, unroll
from tianji.corrections import Estimate, Steps
from tianji.description import Description, averaged
from tianji.distributions import Distribution, distribution
from tianji.env import Continuous
from tianji.errors import Refusal
from tianji.moments import Moments
from tianji.optim import Optimizer, mean_over, spread
from tianji.recurrent import NumpyRecurrent
from tianji.role import generator
from tianji.sight import Sight, normalised
from tianji.store import chooser_once, gatherer_once, served_once
from tianji.train_state import TrainState
from tianji.types import GAP, SEQ, Array, Layout, Leaves, Params, Rollout, floats

Batch = dict[str, Tensor]
"""columns by name, [rows, ...] each; with a memory also "obs" [T, n, ...], "restart" and "where"
[T, n], and "memory" [n, H], the state before row 0"""

MEMORY = "memory"
"""leaf of the recurrent state"""


class Ways(NamedTuple):
    """How an algorithm goes about it: what is not a number of the mathematics they share."""

    epochs: int = 1
    """passes over the batch in one update"""
    minibatches: int = 1
    """parts of each pass, one optimizer step each"""
    clip: float = 0.0
    """how far ratios may move the objective; 0: it is not clipped"""
    value_clip: float = 0.0
    """how far a value may move from the old one; 0: freely"""
    share: bool = True
    """one network for all agents, which is told whose turn it is; False: one for each"""
    central: bool = False
    """values are of the state of all agents, not of what one of them observes"""
    normalise_value: bool = False
    """values are learnt over their running mean and deviation"""


@dataclass(frozen=True)
class OnPolicy:
    """Hyperparameters of all on-policy algorithms, and the parts that need no more than these."""

    name: ClassVar[str] = ""
    traits: ClassVar[Traits] = Traits(on_policy=True, remembers=True, once=True)

    learning_rate: Positive = 3e-4
    """Adam's step size"""
    schedule: Literal["constant", "linear"] = "constant"
    """of the learning rate; linear: to 0 at stop.steps or stop.updates"""
    gamma: Fraction = 0.99
    """discount per step"""
    lam: Fraction = 0.95
    """lambda of the advantage estimate or of V-trace: 0 one-step, 1 Monte Carlo"""
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
    weight_cap: Positive = 2.0
    """relax.correct = "tis": importance weights are cut off here"""

    @property
    def ways(self) -> Ways:
        return Ways()

    def check(self, spec: Spec) -> None:
        _check_batch(self, spec)
        _check_rewards(self, spec)
        _check_observation(self, spec)
        if spec.join == "hogwild" and (
            self.normalise_observation or self.normalise_reward or self.ways.normalise_value
        ):
            raise Refusal(
                'relax.join = "hogwild" shares parameters, not what normalises their inputs: '
                "workers would step one network by differently scaled inputs. Set all of "
                'algorithm.normalise_... but normalise_advantage to false, or scale.relax = "gala".'
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

    def describe(self, spec: Spec) -> Description:
        sight, over = _sight(self, spec), distribution(spec.env.action)
        with torch.device("meta"):
            modules = make_modules(spec, sight, over)
        spread = floats({f"spread.{name}": shape for name, shape in over.shapes.items()})
        moments = (Moments.models(*each) for each in _moments(self, sight).items())
        models = averaged(networks.layout(modules), spread)
        agents = (sight.agents,) if sight.agents else ()
        served = served_once(spec, spec.actors)
        return Description(
            params=_params(modules["policy"], over, sight),
            models={name: model for each in (models, *moments) for name, model in each.items()},
            selection=served.selection,
            pieces=served.pieces,
            slots=spec.window,
            extras=floats({"log_prob": agents}),
            recurrent=floats({MEMORY: (*agents, sight.memory)}) if sight.memory else {},
            gradients=True,
            uses_end=self.schedule == "linear",
        )

    def policy(self, spec: Spec, device: str = "cpu") -> Policy:
        return Policy(self, spec)

    def chooser(self, spec: Spec, lanes: Lanes) -> Chooser:
        return chooser_once(spec, lanes)

    def gatherer(self, spec: Spec, lanes: Lanes) -> Gatherer:
        return gatherer_once(spec, lanes)


def _check_batch(hyper: OnPolicy, spec: Spec) -> None:
    agents, minibatches = max(1, len(spec.env.agents)), hyper.ways.minibatches
    columns = spec.actors * spec.envs * agents // spec.learners
    if spec.network.recurrent != "none" and minibatches > columns:
        raise Refusal(
            f"algorithm.minibatches = {minibatches} exceeds the {columns} sequences of a batch "
            f"(actors x envs_per_actor x agents / learners), which a network with a memory learns "
            f"from as a whole, so some would be empty. Set it to {columns} or less."
        )
    rows = columns * spec.T
    if minibatches > rows:
        raise Refusal(
            f"algorithm.minibatches = {minibatches} exceeds the batch of {rows} steps "
            f"(actors x envs_per_actor x rollout_length / learners), so some would be empty. "
            f"Set it to {rows} or less."
        )


def _check_rewards(hyper: OnPolicy, spec: Spec) -> None:
    if not hyper.normalise_reward:
        return
    follows = "algorithm.normalise_reward follows each env's return from rollout to rollout; "
    if spec.learners > 1:
        raise Refusal(
            f"{follows}with scale.learners = {spec.learners} no learner sees all of an env's, so "
            f"the scale would be wrong. Set normalise_reward = false, or scale.learners = 1."
        )
    if spec.window > 1:
        raise Refusal(
            f"{follows}reuse.window = {spec.window} mixes old and new ones, so the scale would be "
            f"wrong. Set normalise_reward = false, or reuse.window = 1."
        )
    if spec.sends_early:
        raise Refusal(
            f"{follows}with relax.send_when a rollout that is sent early looks like an episode's "
            f"end, so the scale would be wrong. Set normalise_reward = false, or leave send_when "
            f"out."
        )


def _check_observation(hyper: OnPolicy, spec: Spec) -> None:
    env = spec.env
    if "mask" in env.observation and isinstance(env.action, Continuous):
        raise Refusal(
            f'{env.id} says by "mask" which actions are legal, and has continuous ones, of which '
            f"none can be left out: {hyper.name} would choose what is not legal. Let the env clip "
            f"its actions, and leave the mask out."
        )
    if isinstance(env.action, Continuous) and len(set(env.choices)) > 1:
        raise Refusal(
            f"the agents of {env.id} have {', '.join(map(str, env.choices))} continuous actions, "
            f'and {hyper.name} would count those that are padding. Set algorithm.name = "maddpg".'
        )
    if spec.network.recurrent != "none" and spec.network.precision != "float32":
        raise Refusal(
            f'network.precision = "{spec.network.precision}" is for convolutions, and '
            f'network.recurrent = "{spec.network.recurrent}" has none, so it would do nothing. Set '
            f'network.precision = "float32".'
        )
    picture = _sight(hyper, spec).picture
    if picture and spec.network.recurrent != "none":
        raise Refusal(
            f'network.recurrent = "{spec.network.recurrent}" has no convolutions, and {env.id} '
            f"observes pictures, of which it would see single pixels. Set network.recurrent = "
            f'"none" and let observations be stacks of pictures.'
        )
    if picture and hyper.ways.central:
        raise Refusal(
            f"{env.id} observes pictures, which a central value would see as single pixels. Set "
            f'algorithm.critic = "own".'
        )


def _sight(hyper: OnPolicy, spec: Spec) -> Sight:
    share, central = hyper.ways.share, hyper.ways.central
    return Sight(spec, share=share, central=central, normalises=hyper.normalise_observation)


def _params(policy: nn.Module, over: Distribution, sight: Sight) -> Layout:
    """Leaves of a snapshot."""
    return networks.layout({"policy": policy}) | floats(over.shapes | sight.shapes())


def _moments(hyper: OnPolicy, sight: Sight) -> dict[str, tuple[int, ...]]:
    """Shapes of what running moments are of, by name."""
    shapes: dict[str, tuple[int, ...]] = {"obs": sight.own.shape, "return": ()}
    if hyper.ways.normalise_value:
        shapes["value"] = ()
    if sight.critic is not None and sight.state is not None:
        shapes["state"] = sight.state.shape
    return shapes


class Policy:
    """See, ask the network, draw."""

    def __init__(self, hyper: OnPolicy, spec: Spec) -> None:
        self._over = distribution(spec.env.action)
        self._sight = sight = _sight(hyper, spec)
        module = make_modules(spec, sight, self._over)["policy"]
        names = [f"policy.{i}" for i in range(sight.agents)] if sight.separate else ["policy"]
        parts = list(module) if isinstance(module, Each) else [module]
        self._memories = [NumpyRecurrent(name) for name in names] if sight.memory else []
        self._networks = [] if sight.memory else [
            networks.inference(spec.network, sight.leaf, part, name)
            for name, part in zip(names, parts, strict=True)
        ]  # fmt: skip
        self._params: Mapping[str, Array] = {}

    def initial(self, B: int) -> Leaves:
        if not self._sight.memory:
            return {}
        agents = (self._sight.agents,) if self._sight.agents else ()
        return {MEMORY: np.zeros((B, *agents, self._sight.memory), np.float32)}

    def load(self, params: Params) -> None:
        self._params = params
        for network in self._networks:
            network.load(params)
        for memory in self._memories:
            memory.load(params)

    def act(self, observation: Leaves, state: Leaves, rng: np.random.Generator | None) -> Decision:
        obs, mask = observation["obs"], observation.get("mask")
        lead = obs.shape[: 1 + (self._sight.agents > 0)]
        if self._sight.agents:
            obs = obs.reshape(-1, *obs.shape[2:])
            mask = mask.reshape(-1, mask.shape[-1]) if mask is not None else None
        x = self._sight.seen(self._sight.scaled(obs, self._params))
        output, state = self._answer(x, state)
        if rng is None:
            action = self._over.greedy(output, mask)
            return Decision(action.reshape(*lead, *action.shape[1:]), state, {})
        action, log_prob = self._over.sample(output, self._params, rng, mask)
        action = action.reshape(*lead, *action.shape[1:])
        return Decision(action, state, {"log_prob": log_prob.reshape(lead)})

    def _answer(self, x: Array, state: Leaves) -> tuple[Array, Leaves]:
        """What the network gives for each column [N, width], and the recurrent state after it."""
        if not self._sight.memory:
            if not self._sight.separate:
                return self._networks[0](x), state
            A = self._sight.agents
            answers = [network(x[i::A]) for i, network in enumerate(self._networks)]
            return np.stack(answers, 1).reshape(len(x), -1), state
        before = state[MEMORY]
        memory = before.reshape(len(x), -1)
        n = len(self._memories)
        pairs = [net(x[i::n], memory[i::n]) for i, net in enumerate(self._memories)]
        output, after = (np.stack(of, 1).reshape(len(x), -1) for of in zip(*pairs, strict=True))
        return output[:, : self._over.width], {MEMORY: after.reshape(before.shape)}


class Seen(NamedTuple):
    """A part of a batch as the trainer sees it: N columns, of an env or an agent each."""

    obs: Tensor
    """[T + 1, N, ...]: what the policy takes in"""
    critic: Tensor | None
    """[T + 1, N, ...]: what the value takes in, where that differs"""
    mask: Tensor | None
    """[T, N, n] bool"""
    agent: Tensor | None
    """[N], where each has its own networks"""
    restart: Tensor | None
    """[T + 1, N] bool: before this row the memory is empty"""
    memory: Tensor | None
    """[N, H]: before row 0"""


class Trainer:
    """Advantages are estimated as parts arrive; the passes follow when all are there."""

    def __init__(self, hyper: OnPolicy, spec: Spec, device: str = "cpu") -> None:
        self._hyper, self._spec, self._ways = hyper, spec, hyper.ways
        self._device = device
        self._over = distribution(spec.env.action)
        self._sight = _sight(hyper, spec)
        modules = make_modules(spec, self._sight, self._over)
        initialise(modules, self._over.width, generator(spec.seed, "init"))
        self._extra: dict[str, Tensor] = {}
        if self._over.shapes:
            start = torch.full(self._over.shapes["log_std"], hyper.log_std, device=device)
            self._extra["log_std"] = nn.Parameter(start)
            modules["spread"] = nn.ParameterDict(self._extra)
        for module in modules.values():
            module.to(device)
        self._policy = modules["policy"]
        self._value = modules.get("value")
        """None: the last output of the policy's network is the value"""

        self._team = spec.team
        self._optimizer = Optimizer(
            modules,
            hyper.max_grad_norm,
            eps=1e-5,
            team=spec.team,
            shared=spec.shared,
            gradients=spec.gradients,
        )
        self._rng = generator(spec.seed, "learner", spec.index("learner", spec.learner))
        shapes = _moments(hyper, self._sight).items()
        self._moments = {name: Moments(shape) for name, shape in shapes}
        self._running = np.zeros((spec.actors, spec.envs * self._sight.columns), np.float32)
        """discounted return so far, of each column"""
        self._last = np.full(spec.actors, -1)
        """the number of the last rollout of each actor"""
        self.state = TrainState(
            {"all": self._optimizer},
            moments=self._moments,
            arrays={"running": self._running, "last": self._last},
            counters={"updates": 0, "steps": 0},  # the valid ones of updates, for the schedule
            rng=self._rng,
        )
        self._params = Params(_params(self._policy, self._over, self._sight))
        self._parts: list[Batch] = []
        """of each part, the rows that are valid"""
        self._sequences: list[Batch] = []
        """of each part, what a network with a memory is unrolled over"""
        self._observed: dict[str, list[Array]] = {"obs": [], "state": []}

    def take(self, part: Rollout) -> None:
        if not self._parts:
            self._optimizer.refresh()
        part, seen = self._look(part)
        value, output = self._values(seen)
        hyper = self._hyper
        reward = self._rewards(part) if hyper.normalise_reward else part.reward
        steps = Steps(reward, value, part.terminated, part.valid, hyper.gamma, hyper.lam)
        estimate, columns = self._estimate(part, seen, output, steps)
        columns |= {
            "action": part.action,
            "log_prob": estimate.anchor,
            "advantage": estimate.advantage,
            "value": value[:-1],
            "target": estimate.target,
        }
        if estimate.weight is not None:
            columns["weight"] = estimate.weight
        if "alive" in part.observation:
            columns["acts"] = part.observation["alive"][:-1]
        self._keep(part, seen, columns)

    def finish(self) -> Metrics:
        batch = {k: torch.cat([part[k] for part in self._parts]) for k in self._parts[0]}
        target = batch["target"]
        rows, of_targets = spread(self._team, target, target - batch["value"])
        self._normalise_advantage(batch)
        if self._ways.normalise_value:
            self._normalise_value(batch)
        rate = self._learning_rate()
        metrics = self._epochs(batch, rate)
        self.state.counters["updates"] += 1
        self.state.counters["steps"] += rows // self._sight.columns
        self._observe()
        self._parts, self._sequences = [], []
        explained = _explained_variance(*(deviation for _, deviation in of_targets))
        return metrics | {"learning_rate": rate, "explained_variance": explained}

    def params(self, version: int) -> Params:
        for name, array in self._optimizer.flat.arrays().items():
            name = name.removeprefix("spread.")
            if name in self._params:
                np.copyto(self._params[name], array)
        for name, array in self._scales().items():
            np.copyto(self._params[name], array)
        return self._params

    def _estimate(
        self, part: Rollout, seen: Seen, output: Tensor | None, steps: Steps
    ) -> tuple[Estimate, Leaves]:
        """What to learn from each step, and columns that the objective needs beside it."""
        log_mu, correct = part.extras["log_prob"], self._spec.correct
        if correct not in ("vtrace", "tis"):
            return corrections.uncorrected(log_mu, steps), {}
        # What this update begins with corrects for what acted, and anchors the ratio.
        now = self._log_prob(part, seen, output)
        if correct == "tis":
            return corrections.tis(now, log_mu, steps, self._hyper.weight_cap), {}
        return corrections.vtrace(now, log_mu, steps), {}

    def _objective(self, log_pi: Tensor, batch: Batch) -> Tensor:
        """What each row wants made large."""
        raise NotImplementedError

    def _loss(self, batch: Batch, tell: bool) -> tuple[Tensor, list[Tensor]]:
        hyper, ways = self._hyper, self._ways
        output, value = self._forward(batch)
        log_pi, entropy = self._over.evaluate(
            output,
            self._extra,
            batch["action"],
            tell or hyper.entropy_coef > 0,
            batch.get("mask"),
        )
        acts = batch.get("acts")
        policy_loss = -_mean(self._objective(log_pi, batch), acts)
        target = batch["target"]
        value_loss = (value - target).square()
        if ways.value_clip > 0:
            near = (value - batch["value"]).clamp(-ways.value_clip, ways.value_clip)
            value_loss = torch.maximum(value_loss, (batch["value"] + near - target).square())
        value_loss = value_loss.mean()
        loss = policy_loss + hyper.value_coef * value_loss
        if entropy is not None:
            loss = loss - hyper.entropy_coef * _mean(entropy, acts)
        if entropy is None or not tell:
            return loss, []
        with torch.no_grad():
            log_ratio = log_pi - batch["log_prob"]
            ratio = log_ratio.exp()
            told = [policy_loss.detach(), value_loss.detach(), -_mean(entropy, acts)]
            told.append(_mean(ratio - 1 - log_ratio, acts))
            if ways.clip > 0:
                told.append(_mean(((ratio - 1).abs() > ways.clip).float(), acts))
            return loss, told

    def _forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """What the policy's network gives for each row, and its value."""
        obs, agent = batch["obs"], batch.get("agent")
        if self._sight.memory:
            columns = batch.get("column_agent")
            unrolled = unroll(self._policy, obs, batch[MEMORY], batch["restart"], columns)
            output = unrolled[batch["where"]]
        elif agent is None and self._value is not None and "critic" not in batch:
            output, value = networks.together(obs, self._policy, self._value)
            return output, value.squeeze(-1)
        else:
            output = ask(self._policy, obs, agent)
        if self._value is None:
            return output[:, :-1], output[:, -1]
        return output, ask(self._value, batch.get("critic", obs), agent).squeeze(-1)

    def _epochs(self, batch: Batch, rate: float) -> Metrics:
        """All optimizer steps of an update; what the last pass over the batch was like."""
        names = ["loss", "policy_gradient_loss", "value_loss", "entropy_loss", "approx_kl"]
        names += ["clip_fraction", "grad_norm"] if self._ways.clip > 0 else ["grad_norm"]
        told: list[Tensor] = []
        counts: list[int] = []
        for epoch in range(self._ways.epochs):
            last = epoch == self._ways.epochs - 1
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

    def _minibatches(self, batch: Batch) -> Iterator[Batch]:
        if self._sequences:
            yield from self._minibatches_of_columns(batch)
            return
        N = len(batch["advantage"])
        order = torch.from_numpy(self._rng.permutation(N)).to(self._device)
        shuffled = {k: v.index_select(0, order) for k, v in batch.items()}
        for begin, end in itertools.pairwise(self._cuts(N)):
            yield {k: v[begin:end] for k, v in shuffled.items()}

    def _minibatches_of_columns(self, batch: Batch) -> Iterator[Batch]:
        """Whole sequences; of each, the rows that are valid."""
        over = self._sequences[0]
        along = {k: 0 if k in (MEMORY, "column_agent") else 1 for k in over}
        whole = {k: torch.cat([s[k] for s in self._sequences], along[k]) for k in over}
        N = len(whole[MEMORY])
        order = torch.from_numpy(self._rng.permutation(N)).to(self._device)
        for begin, end in itertools.pairwise(self._cuts(N)):
            drawn = {k: v.index_select(along[k], order[begin:end]) for k, v in whole.items()}
            place = drawn.pop("row")
            where = place >= 0
            rows = place[where]
            yield {k: v.index_select(0, rows) for k, v in batch.items()} | drawn | {"where": where}

    def _cuts(self, N: int) -> list[int]:
        return [N * i // self._ways.minibatches for i in range(self._ways.minibatches + 1)]

    def _look(self, part: Rollout) -> tuple[Rollout, Seen]:
        """The part with a column for each agent, and what networks take in of it."""
        sight = self._sight
        state = part.observation.get("state")
        folded = fold(part, sight.agents)
        obs = folded.observation["obs"]
        if sight.normalises:
            acts = folded.valid
            if "alive" in folded.observation:
                acts = acts & folded.observation["alive"][:-1]
            self._observed["obs"].append(obs[:-1][acts])
            if state is not None and "state" in self._moments:
                self._observed["state"].append(state[:-1][part.valid])
                moments = self._moments["state"]
                state = normalised(state, moments.mean.astype(np.float32), moments.scale())
        scaled = sight.scaled(obs, self._scales())
        mask = folded.observation.get("mask")
        agent = restart = memory = None
        if sight.separate:
            agent = torch.arange(obs.shape[1], device=self._device) % sight.agents
        if sight.memory:
            restarted = np.zeros(obs.shape[:2], np.bool_)
            np.logical_or(folded.terminated, ~folded.valid, out=restarted[1:])
            restart, memory = self._tensor(restarted), self._tensor(folded.once[MEMORY])
        return folded, Seen(
            obs=self._tensor(sight.seen(scaled)),
            critic=None if sight.critic is None else self._tensor(sight.central(scaled, state)),
            mask=None if mask is None else self._tensor(mask[:-1]),
            agent=agent,
            restart=restart,
            memory=memory,
        )

    def _values(self, seen: Seen) -> tuple[Array, Tensor | None]:
        """Of all T + 1 rows [T + 1, N]; and what the policy gives for them, where both are one."""
        output, lead = None, seen.obs.shape[:2]
        with torch.no_grad():
            if self._value is None:
                unrolled = self._outputs(self._policy, seen)
                output, values = unrolled[..., :-1], unrolled[..., -1]
            else:
                x = seen.obs if seen.critic is None else seen.critic
                values = chunked(self._value, x, seen.agent).view(lead)
        value: Array = values.cpu().numpy()
        if self._ways.normalise_value:
            moments = self._moments["value"]
            value = value / moments.scale() + moments.mean.astype(np.float32)
        return value, output

    def _outputs(self, network: nn.Module, seen: Seen, rows: int | None = None) -> Tensor:
        """What a policy network gives for the first rows, [rows, N, n]; None: for all T + 1."""
        obs = seen.obs[:rows]
        with torch.no_grad():
            if seen.memory is not None and seen.restart is not None:
                return unroll(network, obs, seen.memory, seen.restart[:rows], seen.agent)
            return chunked(network, obs, seen.agent)

    def _log_prob(
        self,
        part: Rollout,
        seen: Seen,
        output: Tensor | None = None,
        network: nn.Module | None = None,
        extra: Mapping[str, Tensor] | None = None,
    ) -> Array:
        """Of actions [T, N], by the policy as it is, or by another network with its own spread."""
        T = len(part.action)
        if output is None:
            output = self._outputs(self._policy if network is None else network, seen, T)
            output = output[..., : self._over.width]
        action = self._tensor(part.action).flatten(0, 1)
        mask = None if seen.mask is None else seen.mask.flatten(0, 1)
        with torch.no_grad():
            found, _ = self._over.evaluate(
                output[:T].flatten(0, 1), extra or self._extra, action, False, mask
            )
        log_prob: Array = found.view(part.reward.shape).cpu().numpy()
        return log_prob

    def _keep(self, part: Rollout, seen: Seen, columns: Leaves) -> None:
        """Hold what the passes need of a part: the rows that are valid."""
        valid = self._tensor(np.flatnonzero(part.valid))
        tensors = {k: self._tensor(v) for k, v in columns.items()}
        if seen.critic is not None:
            tensors["critic"] = seen.critic[:-1]
        if seen.mask is not None:
            tensors["mask"] = seen.mask
        if seen.agent is not None:
            tensors["agent"] = seen.agent.expand(part.reward.shape)
        if seen.memory is None or seen.restart is None:
            tensors["obs"] = seen.obs[:-1]
        else:
            before = sum(len(rows["advantage"]) for rows in self._parts)
            row = np.full(part.valid.shape, -1, np.int64)
            row[part.valid] = before + np.arange(len(valid))
            sequence = {"obs": seen.obs[:-1], "restart": seen.restart[:-1], MEMORY: seen.memory}
            sequence["row"] = self._tensor(row)
            if seen.agent is not None:
                sequence["column_agent"] = seen.agent
            self._sequences.append(sequence)
        self._parts.append({k: v.flatten(0, 1)[valid] for k, v in tensors.items()})

    def _normalise_advantage(self, batch: Batch) -> None:
        """To mean 0 and variance 1 over the rows in which an agent acts; these are weighed so that
        a mean over all rows becomes one over them."""
        advantage, weight, acts = batch["advantage"], batch.get("weight"), batch.get("acts")
        # Weights are taken out for it. With them in, what the policy would hardly do has advantage
        # 0, falls below the mean, and is unlearnt without a reason.
        plain = advantage if weight is None else torch.where(weight > 0, advantage / weight, 0.0)
        acting, ((mean, deviation),) = spread(self._team, plain if acts is None else plain[acts])
        if self._hyper.normalise_advantage and acting > 0:
            plain = (plain - mean) / (deviation + 1e-8)
            batch["advantage"] = plain if weight is None else weight * plain
        if acts is not None:
            rows, _ = spread(self._team, plain)
            batch["acts"] = acts * (rows / max(1, acting))

    def _normalise_value(self, batch: Batch) -> None:
        moments = self._moments["value"]
        moments.update_together(self._team, [batch["target"].cpu().numpy()])
        mean, scale = float(moments.mean), float(moments.scale())
        for name in ("target", "value"):
            batch[name] = (batch[name] - mean) * scale

    def _observe(self) -> None:
        """Join what was observed into the moments, for the next update."""
        for name, seen in self._observed.items():
            if self._team.size > 1 and self._sight.normalises and name in self._moments:
                self._moments[name].update_together(self._team, seen)
                seen.clear()
            while seen:
                self._moments[name].update(seen.pop(0))

    def _scales(self) -> Leaves:
        """What observations are normalised by."""
        if not self._sight.normalises:
            return {}
        obs = self._moments["obs"]
        return {"obs.mean": obs.mean.astype(np.float32), "obs.scale": obs.scale()}

    def _learning_rate(self) -> float:
        hyper, spec = self._hyper, self._spec
        if hyper.schedule == "constant":
            return hyper.learning_rate
        counters = self.state.counters
        done = counters["updates"] * spec.groups / spec.updates if spec.updates else 0.0
        # A run's steps are those of all groups.
        done = max(done, counters["steps"] * spec.groups / spec.steps if spec.steps else 0.0)
        return hyper.learning_rate * max(0.0, 1.0 - done)

    def _rewards(self, part: Rollout) -> Array:
        """Rewards over the deviation of the discounted return, as it was before this part."""
        moments = self._moments["return"]
        scale = moments.scale()
        follows = part.head[SEQ] == self._last[part.source] + 1 and not part.head[GAP]
        self._last[part.source] = part.head[SEQ]
        if not follows:  # another env, or a rollout between them was too stale
            self._running[part.source] = 0.0
        ended = part.terminated | ~part.valid
        running, self._running[part.source] = returns.discounted(
            part.reward, ended, self._running[part.source], self._hyper.gamma
        )
        moments.update(running[part.valid])
        return normalised(part.reward, np.float32(0.0), scale)

    def _tensor(self, array: Array) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _mean(x: Tensor, acts: Tensor | None) -> Tensor:
    return x.mean() if acts is None else (x * acts).mean()


def _explained_variance(target: Tensor, error: Tensor) -> float:
    """By the deviations of the returns, and of what values left of them unexplained. 1: values
    foretell the returns; 0: no better than their mean."""
    variance = float(target.square())
    return 0.0 if variance < 1e-12 else 1.0 - float(error.square()) / variance
