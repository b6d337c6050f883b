"""QMIX (Rashid et al. 2018) and VDN (Sunehag et al. 2018): a team's value from its agents'."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from tianji import networks, off_policy, returns
from tianji.algorithm import (
    Count,
    Decision,
    Fraction,
    Lanes,
    Metrics,
    NotNegative,
    Positive,
    Spec,
    Whole,
)
from tianji.description import Description
from tianji.env import Discrete, EnvSpec
from tianji.episodes import SELECTION, Episodes, PaddedEpisodes
from tianji.errors import Refusal
from tianji.off_policy import Networks, OffPolicy
from tianji.recurrent import NumpyRecurrent, Recurrent
from tianji.role import generator
from tianji.store import numbers
from tianji.types import Array, Leaves, Params, Rollout, leaf


@dataclass(frozen=True)
class VDN(OffPolicy):
    """Off-policy, for teams of agents with discrete actions; batches are whole episodes.

    All agents have one network with a memory, told who acts and what it did last. The value of what
    the team does is the sum of what its agents' actions are worth; the team's reward is the env's,
    or the mean over its agents where each has its own. An agent that is not alive is worth 0.
    """

    name: ClassVar[str] = "vdn"

    learning_rate: Positive = 5e-4
    """Adam's step size"""
    gamma: Fraction = 0.99
    """discount per step"""
    td_lambda: Fraction = 0.0
    """targets are TD(lambda) returns, whose later actions are not corrected; 0: of one step"""
    batch_size: Count = 32
    """episodes that one update consumes"""
    new_steps: Count = 256
    """new steps for each update, resets counted"""
    capacity: Count = 100_000
    """steps that replay holds, resets counted; rounded up to whole rollouts"""
    warmup: Count = 5_000
    """steps before the first update, resets counted"""
    double: bool = True
    """the online network chooses the next actions, the target network values them"""
    target_every: Whole = 200
    """updates between copies to the target network; 0: it follows by tau at every update"""
    tau: Fraction = 0.01
    """share of the way that the target network goes at each update"""
    epsilon_start: Fraction = 1.0
    """share of random actions at the start, among the legal ones"""
    epsilon_end: Fraction = 0.05
    """share of random actions at the end of the schedule"""
    epsilon_steps: Count = 50_000
    """env steps over which the share falls"""
    max_grad_norm: NotNegative = 10.0
    """the gradient is scaled down to this norm; 0: never"""

    def check(self, spec: Spec) -> None:
        self._check_env(spec)
        if len(set(spec.network.hidden)) != 1 or len(spec.network.hidden) > 2:
            width = (spec.network.hidden or (64,))[0]
            raise Refusal(
                f"network.hidden = {list(spec.network.hidden)} does not fit {self.name}: its agents"
                f" have one layer and one memory, of the same width. Set it to [{width}]."
            )
        if spec.network.precision != "float32":
            raise Refusal(
                f'network.precision = "{spec.network.precision}" is for convolutions, and '
                f"{self.name} has none, so it would do nothing. Set network.precision = "
                f'"float32".'
            )
        if spec.sends_early:
            raise Refusal(
                f"{self.name} replays whole episodes, and relax.send_when cuts them where a rollout"
                f" is sent before it is full. Take relax.send_when out."
            )
        limit = spec.env.max_episode_steps
        assert limit is not None
        envs = spec.actors * spec.envs
        # An episode and the row that resets its env; where actors go on unevenly, the quickest's.
        least = envs * (limit + 1)
        if self.warmup < least:
            raise Refusal(
                f"algorithm.warmup = {self.warmup} is too early: {spec.env.id} has episodes of up "
                f"to {limit} steps, and before {least} steps of {envs} envs none may have ended. "
                f"Set warmup to {least} or more."
            )
        room = self.slots(spec) * spec.T
        if room < 2 * (limit + 1) + spec.T or self.capacity < self.warmup:
            most = max(self.warmup, envs * (2 * (limit + 1) + spec.T))
            raise Refusal(
                f"algorithm.capacity = {self.capacity} is too small: episodes of up to {limit} "
                f"steps would be given up before they have ended. Set capacity to {most} or more."
            )
        self.check_shares(spec)

    def make_networks(self, spec: Spec) -> Networks:
        inputs, observation = Inputs(spec.env), spec.env.observation
        state = int(np.prod(observation.get("state", observation["obs"]).shape, dtype=np.int64))
        agent, mixer = _agent(spec, inputs), self.mixer(inputs.agents, state)
        targets = {"target.q": agent, "target.mixer": mixer}
        return Networks(
            {"q": {"q": agent, "mixer": mixer}}, {"q": targets}, {"q": agent}, "epsilon"
        )

    def describe(self, spec: Spec) -> Description:
        A = len(spec.env.agents)
        memory = leaf((A, spec.network.hidden[-1]), np.float32)
        return replace(
            super().describe(spec),
            selection=numbers(SELECTION, self.batch_size),
            recurrent={"memory": memory, "last": leaf((A,), np.int64)},
        )

    def policy(self, spec: Spec, device: str = "cpu") -> Policy:
        return Policy(spec)

    def chooser(self, spec: Spec, lanes: Lanes) -> Episodes:
        return Episodes(lanes, self.batch_size, self.slots(spec))

    def gatherer(self, spec: Spec, lanes: Lanes) -> PaddedEpisodes:
        return PaddedEpisodes(lanes)

    def trainer(self, spec: Spec, device: str = "cpu") -> Trainer:
        return Trainer(self, spec, device)

    def mixer(self, agents: int, state: int) -> Mixer:
        """What makes the team's value of its agents'."""
        return Sum()

    def epsilon(self, version: int) -> float:
        """By the env steps that a policy version stands for."""
        return self._between(self.epsilon_start, self.epsilon_end, version, self.epsilon_steps)

    def _check_env(self, spec: Spec) -> None:
        env = spec.env
        if not env.agents:
            raise Refusal(
                f"{self.name} divides the value of a team among its agents, and {env.id} has only "
                f'one. Set algorithm.name = "dqn" for discrete actions, "ppo" for others.'
            )
        if not isinstance(env.action, Discrete):
            raise Refusal(
                f"{self.name} chooses among a finite number of actions; {env.id} has "
                f"{type(env.action).__name__} actions, which it cannot rank. Set env.kwargs so that"
                f' its actions are discrete, or algorithm.name = "ppo".'
            )
        if spec.network.kind == "cnn" or env.frames > 1 or env.observation["obs"].dtype == np.uint8:
            raise Refusal(
                f"{self.name} has no convolutions, so its agents cannot look at the pictures of "
                f'{env.id}. Set network.kind = "mlp", or algorithm.name = "ppo".'
            )
        if env.max_episode_steps is None:
            raise Refusal(
                f"{self.name} replays whole episodes, and {env.id} does not say how long they "
                f"become, so there may be no room for one. Set max_episode_steps in the env's spec."
            )


@dataclass(frozen=True)
class QMIX(VDN):
    """Off-policy, for teams of agents with discrete actions; batches are whole episodes.

    As VDN, but the value of the team is any function of its agents' values that falls with none of
    them, by weights that depend on "state" (all agents' observations where the env has none).
    """

    name: ClassVar[str] = "qmix"

    mixing: Count = 32
    """width of the layer that mixes"""
    hyper: Count = 64
    """width of the layers that make its weights"""

    def mixer(self, agents: int, state: int) -> Mixer:
        return Monotonic(agents, state, self.mixing, self.hyper)


class Mixer(nn.Module):
    """Agents' values [..., A] and the state [..., S] to the team's value [...]."""


class Sum(Mixer):
    """The sum of the agents' values."""

    def forward(self, values: Tensor, state: Tensor) -> Tensor:
        return values.sum(-1)


class Monotonic(Mixer):
    """Two layers whose weights other networks make of the state, and which are never negative."""

    def __init__(self, agents: int, state: int, width: int, hyper: int) -> None:
        super().__init__()
        self.agents, self.width = agents, width
        self.first = _layers(state, hyper, agents * width)
        self.first_bias = nn.Linear(state, width)
        self.second = _layers(state, hyper, width)
        self.second_bias = _layers(state, width, 1)

    def forward(self, values: Tensor, state: Tensor) -> Tensor:
        weight = self.first(state).abs().unflatten(-1, (self.agents, self.width))
        mixed = (values.unsqueeze(-2) @ weight).squeeze(-2) + self.first_bias(state)
        mixed = functional.elu(mixed)
        total: Tensor = (mixed * self.second(state).abs()).sum(-1, keepdim=True)
        total = total + self.second_bias(state)
        return total.squeeze(-1)


def _layers(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


class Inputs:
    """What agents look at: their observation, what they did last, and who they are."""

    def __init__(self, env: EnvSpec) -> None:
        assert isinstance(env.action, Discrete)
        self.agents, self.actions = len(env.agents), env.action.n
        self.seen = int(np.prod(env.observation["obs"].shape[1:], dtype=np.int64))
        self.width = self.seen + self.actions + self.agents
        self._axes = len(env.observation["obs"].shape)
        self._legal = np.ones((self.agents, self.actions), np.bool_)
        for own, n in zip(self._legal, env.choices, strict=False):
            own[n:] = False

    def join(self, obs: Array, last: Array) -> Array:
        """[..., A, width], from observations [..., A, ...] and last actions [..., A], -1 before
        the first."""
        rows = last.shape
        x = np.zeros((*rows, self.width), np.float32)
        x[..., : self.seen] = obs.reshape(*rows, self.seen)
        did = x[..., self.seen : self.seen + self.actions]
        np.equal(last[..., None], np.arange(self.actions), out=did, casting="unsafe")
        x[..., self.seen + self.actions :] = np.eye(self.agents, dtype=np.float32)
        return x

    def legal(self, observation: Leaves) -> Array:
        """[..., A, n] bool: what each agent may do."""
        if (mask := observation.get("mask")) is not None:
            return mask
        rows = observation["obs"].shape[: -self._axes]
        return np.broadcast_to(self._legal, (*rows, *self._legal.shape))


def _agent(spec: Spec, inputs: Inputs) -> Recurrent:
    return Recurrent(inputs.width, spec.network.hidden[-1], inputs.actions)


class Policy:
    """Each agent's best legal action, or with probability epsilon any legal one."""

    def __init__(self, spec: Spec) -> None:
        self._inputs = Inputs(spec.env)
        module = _agent(spec, self._inputs)
        self._hidden = module.hidden
        self._network = NumpyRecurrent("q")
        self._epsilon = 1.0

    def initial(self, B: int) -> Leaves:
        A = self._inputs.agents
        memory = np.zeros((B, A, self._hidden), np.float32)
        return {"memory": memory, "last": np.full((B, A), -1, np.int64)}

    def load(self, params: Params) -> None:
        self._network.load(params)
        self._epsilon = float(params["epsilon"])

    def act(self, observation: Leaves, state: Leaves, rng: np.random.Generator | None) -> Decision:
        B, A = state["last"].shape
        x = self._inputs.join(observation["obs"], state["last"])
        values, memory = self._network(
            x.reshape(B * A, -1), state["memory"].reshape(B * A, self._hidden)
        )
        legal = self._inputs.legal(observation)
        action: Array = np.where(legal, values.reshape(B, A, -1), -np.inf).argmax(axis=-1)
        if rng is not None:
            explore = rng.random((B, A)) < self._epsilon
            drawn = np.where(legal, rng.random(legal.shape), -1.0).argmax(axis=-1)
            action = np.where(explore, drawn, action)
        return Decision(action, {"memory": memory.reshape(B, A, -1), "last": action}, {})


class Trainer(off_policy.Trainer):
    """One gradient step on a batch of whole episodes."""

    def __init__(self, hyper: VDN, spec: Spec, device: str = "cpu") -> None:
        self._hyper = hyper
        self._inputs = Inputs(spec.env)
        made = hyper.make_networks(spec)
        self._online = nn.ModuleDict(made.modules["q"])
        agent, rng = made.acting["q"], generator(spec.seed, "init")
        assert isinstance(agent, Recurrent)
        agent.initialise(rng, last=1.0)
        _initialise(self._online["mixer"], rng)
        super().__init__(hyper, spec, device, made)
        copies = self._copies["q"].items()
        self._target = nn.ModuleDict({k.removeprefix("target."): copied for k, copied in copies})

    def _learn(self, part: Rollout) -> Metrics:
        loss, value = self._loss(part)
        rows = int(np.count_nonzero(part.valid))
        norm = self._optimizers["q"].step(loss, self._hyper.learning_rate, rows)
        self._follow(self._hyper.target_every, self._hyper.tau)
        told = torch.stack([loss.detach(), value, norm])
        return self._means(("loss", "q_mean", "grad_norm"), told, rows) | {
            "learning_rate": self._hyper.learning_rate,
            "epsilon": self._scalar(self._updates),
        }

    def _scalar(self, version: int) -> float:
        return self._hyper.epsilon(version * self._spec.groups)

    def _loss(self, part: Rollout) -> tuple[Tensor, Tensor]:
        """The squared temporal-difference error of the team's value, and the mean of that value,
        both over the rows that are valid."""
        hyper, tensor, observation = self._hyper, self._tensor, part.observation
        L, N = part.valid.shape
        last = np.concatenate([np.full_like(part.action[:1], -1), part.action])
        x = tensor(self._inputs.join(observation["obs"], last))  # [L + 1, N, A, inputs]
        legal = tensor(self._inputs.legal(observation))  # [L + 1, N, A, n]
        seen = observation.get("state", observation["obs"])
        state = networks.floats(tensor(seen)).reshape(L + 1, N, -1)
        alive = tensor(observation["alive"]) if "alive" in observation else None
        valid = tensor(part.valid)
        action = tensor(part.action).unsqueeze(-1)
        values = self._values(self._online, x)  # [L + 1, N, A, n]
        with torch.no_grad():
            then = self._values(self._target, x).masked_fill(~legal, -torch.inf)
            if hyper.double:
                best = values.masked_fill(~legal, -torch.inf).argmax(-1, keepdim=True)
                following = then.gather(-1, best).squeeze(-1)
            else:
                following = then.amax(-1)
            following = torch.where(
                legal.any(-1), following, 0.0
            )  # who can do nothing adds nothing
            following = self._mix(self._target, following, alive, state)  # [L + 1, N]
            reward = part.reward if part.reward.ndim == 2 else part.reward.mean(axis=2)
            target = returns.td_lambda(
                reward, following.cpu().numpy(), part.terminated, part.valid,
                hyper.gamma, hyper.td_lambda,
            )  # fmt: skip
        taken = values[:-1].gather(-1, action).squeeze(-1)  # [L, N, A]
        alive = None if alive is None else alive[:-1]
        total = self._mix(self._online, taken, alive, state[:-1])[valid]
        return functional.mse_loss(total, tensor(target)[valid]), total.detach().mean()

    def _values(self, networks: nn.ModuleDict, x: Tensor) -> Tensor:
        """Of all actions, over episodes from their beginning, where nothing is remembered."""
        L, N, A, _ = x.shape
        agent = networks["q"]
        assert isinstance(agent, Recurrent)
        nothing = x.new_zeros(N * A, agent.hidden)
        goes_on = torch.zeros(L, N * A, dtype=torch.bool, device=x.device)
        values, _ = agent(x.reshape(L, N * A, -1), nothing, goes_on)
        return values.reshape(L, N, A, -1)  # type: ignore[no-any-return]

    def _mix(
        self, networks: nn.ModuleDict, values: Tensor, alive: Tensor | None, state: Tensor
    ) -> Tensor:
        if alive is not None:
            values = values.masked_fill(~alive, 0.0)
        return networks["mixer"](values, state)  # type: ignore[no-any-return]

    def _tensor(self, array: Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def _initialise(mixer: nn.Module, rng: np.random.Generator) -> None:
    """Uniform weights and biases within 1 / sqrt(inputs) of zero."""
    with torch.no_grad():
        for layer in mixer.modules():
            if isinstance(layer, nn.Linear):
                bound = layer.in_features**-0.5
                for parameter in (layer.weight, layer.bias):
                    drawn = rng.uniform(-bound, bound, tuple(parameter.shape))
                    parameter.copy_(torch.from_numpy(drawn))
