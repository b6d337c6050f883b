"""Multi-agent deep deterministic policy gradients (Lowe et al. 2017): critics that see everything
while learning, policies that act by what their agent sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from tianji import networks, off_policy
from tianji.algorithm import Count, Decision, Fraction, Metrics, NotNegative, Positive, Spec
from tianji.description import Description
from tianji.env import Continuous, Discrete, MultiDiscrete
from tianji.errors import Refusal
from tianji.off_policy import Networks, OffPolicy
from tianji.role import generator
from tianji.types import Array, Leaf, Leaves, Params, Rollout, leaf

NEVER = -1e9
"""the logit of an action that is not legal"""


@dataclass(frozen=True)
class MADDPG(OffPolicy):
    """Off-policy, for several agents with continuous or discrete actions."""

    name: ClassVar[str] = "maddpg"

    learning_rate: Positive = 1e-3
    """Adam's step size for the policies"""
    critic_learning_rate: Positive = 1e-3
    """Adam's step size for the critics"""
    gamma: Fraction = 0.95
    """discount per step"""
    batch_size: Count = 1024
    """steps that one update consumes"""
    new_steps: Count = 100
    """new steps for each update, resets counted; batch_size / new_steps is the replay ratio"""
    capacity: Count = 200_000
    """steps that replay holds, resets counted; rounded up to whole rollouts"""
    warmup: Count = 2_048
    """steps before the first update, resets counted"""
    n_step: Count = 1
    """rewards that a target sums before it bootstraps"""
    tau: Fraction = 0.01
    """share of the way that the target networks go at each update"""
    share: bool = False
    """one policy and one critic for all agents, who are told apart by a number in their input;
    false: each has its own"""
    noise: Literal["gaussian", "ou"] = "gaussian"
    """added to continuous actions: new at every step, or Ornstein-Uhlenbeck's, which wanders"""
    noise_start: NotNegative = 0.3
    """deviation of the noise at the start, as a share of half the range of an action"""
    noise_end: NotNegative = 0.1
    """deviation at the end of the schedule"""
    noise_steps: Count = 100_000
    """env steps over which it falls"""
    noise_pull: Fraction = 0.15
    """how far the noise of "ou" goes back to 0 in a step"""
    temperature: Positive = 1.0
    """of the Gumbel-softmax that discrete actions are learnt by"""
    regularise: NotNegative = 1e-3
    """weight of the mean square of the policies' outputs, which keeps them from saturating"""
    max_grad_norm: NotNegative = 0.5
    """gradients of policies and of critics are scaled down to this norm; 0: never"""

    def check(self, spec: Spec) -> None:
        env = spec.env
        if not env.agents:
            raise Refusal(
                f"maddpg learns for several agents, and {env.id} has one, so that there is nothing "
                f'to centralise. Set algorithm.name = "sac" or "td3" for continuous actions, or '
                f'"ppo" for any.'
            )
        if isinstance(env.action, MultiDiscrete):
            raise Refusal(
                f"maddpg chooses one action or a vector of reals for each agent; {env.id} wants "
                f'several choices at once. Set algorithm.name = "mappo".'
            )
        if (
            isinstance(env.action, Continuous)
            and not np.isfinite([*env.action.low, *env.action.high]).all()
        ):
            raise Refusal(
                f"maddpg scales its actions to their bounds, and {env.id} has actions without any, "
                f"so that they would be infinite. Bound the env's action space, or set "
                f'algorithm.name = "mappo".'
            )
        obs = env.observation["obs"]
        if networks.kind(spec.network, leaf(obs.shape[1:], obs.dtype)) == "cnn":
            raise Refusal(
                f"maddpg's critics take vectors; {env.id} observes pictures, {obs.shape[1:]} for "
                f'each agent. Set algorithm.name = "mappo" with critic = "own", or network.kind = '
                f'"mlp" to take them as vectors.'
            )
        self.check_replay(spec, self.n_step)

    def make_networks(self, spec: Spec) -> Networks:
        policies = _policies(self, spec)
        both = {"policy": policies, "critic": _critics(self, spec)}
        targets = {k: {f"target_{name}": m for name, m in of.items()} for k, of in both.items()}
        return Networks(both, targets, policies, "noise")

    def describe(self, spec: Spec) -> Description:
        found = super().describe(spec)
        if self.noise != "ou" or not isinstance(spec.env.action, Continuous):
            return found
        noise = leaf((len(spec.env.agents), _width(spec)), np.float32)
        return replace(found, recurrent={"noise": noise})

    def policy(self, spec: Spec, device: str = "cpu") -> Policy:
        return Policy(self, spec)

    def trainer(self, spec: Spec, device: str = "cpu") -> Trainer:
        return Trainer(self, spec, device)

    def deviation(self, version: int) -> float:
        """Of the noise, by the env steps that a policy version stands for."""
        return self._between(self.noise_start, self.noise_end, version, self.noise_steps)


def _width(spec: Spec) -> int:
    """Numbers of one agent's action, as a critic sees it."""
    action = spec.env.action
    return action.n if isinstance(action, Discrete) else action.leaf.shape[0]


def _names(hyper: MADDPG, spec: Spec, kind: str) -> list[str]:
    """Of the networks: one for all agents, or one for each."""
    return [kind] if hyper.share else [f"{kind}.{agent}" for agent in spec.env.agents]


def _seen(hyper: MADDPG, spec: Spec) -> Leaf:
    """What a policy's network takes: what an agent observes and, where shared, which one it is."""
    A, *shape = spec.env.observation["obs"].shape
    return leaf((int(np.prod(shape)) + hyper.share * A,), np.float32)


def _policies(hyper: MADDPG, spec: Spec) -> dict[str, nn.Module]:
    mlp, seen = networks.MLP, _seen(hyper, spec)
    return {n: mlp(spec.network, seen, _width(spec)) for n in _names(hyper, spec, "policy")}


def _critics(hyper: MADDPG, spec: Spec) -> dict[str, nn.Module]:
    """From the state, or all that agents observe, and all their actions to a value."""
    observation, A = spec.env.observation, len(spec.env.agents)
    world = observation.get("state", observation["obs"]).shape
    seen = leaf((int(np.prod(world)) + A * _width(spec) + hyper.share * A,), np.float32)
    return {n: networks.MLP(spec.network, seen, 1) for n in _names(hyper, spec, "critic")}


def _gumbel(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Noise that makes the largest logit a draw from their softmax."""
    drawn = rng.standard_exponential(shape, np.float32)
    return -np.log(np.maximum(drawn, np.float32(1e-30)))


class Policy:
    """Each agent by what it observes: an action and noise, or a draw of one of n."""

    def __init__(self, hyper: MADDPG, spec: Spec) -> None:
        modules, seen = _policies(hyper, spec), _seen(hyper, spec)
        self._networks = [
            networks.inference(spec.network, seen, module, name) for name, module in modules.items()
        ]
        self._hyper = hyper
        self._agents, self._n = len(spec.env.agents), _width(spec)
        self._which = np.eye(self._agents, dtype=np.float32)
        self._wanders = isinstance(spec.env.action, Continuous) and hyper.noise == "ou"
        self._middle: Array | None = None
        if isinstance(spec.env.action, Continuous):
            self._middle, self._half = _range(spec.env.action)
        self._deviation = 0.0

    def initial(self, B: int) -> Leaves:
        if not self._wanders:
            return {}
        return {"noise": np.zeros((B, self._agents, self._n), np.float32)}

    def load(self, params: Params) -> None:
        for network in self._networks:
            network.load(params)
        self._deviation = float(params["noise"])

    def act(self, observation: Leaves, state: Leaves, rng: np.random.Generator | None) -> Decision:
        output = self._outputs(observation["obs"])  # [B, A, n]
        if self._middle is None:
            if "mask" in observation:
                output = np.where(observation["mask"], output, np.float32(NEVER))
            if rng is not None:
                output = output + _gumbel(rng, output.shape)
            return Decision(output.argmax(axis=-1), state, {})
        inside = np.tanh(output)
        if rng is not None:
            noise = rng.standard_normal(output.shape, np.float32) * np.float32(self._deviation)
            if self._wanders:
                noise += state["noise"] * np.float32(1 - self._hyper.noise_pull)
                state = {"noise": noise}
            inside = np.clip(inside + noise, -1, 1)
        return Decision(self._middle + self._half * inside, state, {})

    def _outputs(self, obs: Array) -> Array:
        B, A = len(obs), self._agents
        obs = obs.reshape(B, A, -1)
        if self._hyper.share:
            scale = np.float32(networks.BYTE if obs.dtype == np.uint8 else 1.0)
            obs = np.multiply(obs, scale, dtype=np.float32)
            obs = np.concatenate([obs, np.broadcast_to(self._which, (B, A, A))], -1, dtype="f4")
            return self._networks[0](obs.reshape(B * A, -1)).reshape(B, A, -1)
        return np.stack([net(obs[:, i]) for i, net in enumerate(self._networks)], axis=1)


def _range(action: Continuous) -> tuple[Array, Array]:
    """The middle and half the range of an action."""
    low, high = np.array(action.low, np.float32), np.array(action.high, np.float32)
    return (low + high) / 2, (high - low) / 2


class Trainer(off_policy.Trainer):
    """One gradient step of all critics, then one of all policies, on a batch from replay."""

    def __init__(self, hyper: MADDPG, spec: Spec, device: str = "cpu") -> None:
        self._hyper = hyper
        made = hyper.make_networks(spec)
        policies, critics = made.modules["policy"], made.modules["critic"]
        rng = generator(spec.seed, "init")
        for modules, last in ((policies, 0.01), (critics, 1.0)):
            for module in modules.values():
                networks.initialise(module, rng, 2**0.5, last=last)
        super().__init__(hyper, spec, device, made)
        self._policies, self._critics = list(policies.values()), list(critics.values())
        self._target_policies = list(self._copies["policy"].values())
        self._target_critics = list(self._copies["critic"].values())
        self._agents, self._n = len(spec.env.agents), _width(spec)
        self._which = torch.eye(self._agents, device=device)
        self._own = self._which.bool()[:, :, None, None]  # [critic, agent, N, n]
        self._used = self._tensor(_used(spec)).unsqueeze(1)  # [A, 1, n]

    def _learn(self, part: Rollout) -> Metrics:
        hyper = self._hyper
        batch = self._batch(part)
        alive = part.observation.get("alive")
        rows = part.valid.size * self._agents if alive is None else int(alive[0].sum())
        critic_loss, value = self._critic_loss(batch)
        critic_norm = self._optimizers["critic"].step(critic_loss, hyper.critic_learning_rate, rows)
        self._freeze(True)  # what is learnt from here on is the policies' alone
        policy_loss, spread = self._policy_loss(batch)
        norm = self._optimizers["policy"].step(policy_loss, hyper.learning_rate, rows)
        self._freeze(False)
        self._follow(0, hyper.tau)
        loss = [critic_loss.detach(), policy_loss.detach()]
        told = torch.stack([*loss, value, spread, critic_norm, norm])
        names = "critic_loss", "policy_loss", "q_mean", "entropy", "critic_grad_norm", "grad_norm"
        metrics = self._means(names, told, rows)
        if isinstance(self._spec.env.action, Continuous):
            del metrics["entropy"]
            metrics["noise"] = self._scalar(self._updates)
        return metrics | {"learning_rate": hyper.learning_rate}

    def _scalar(self, version: int) -> float:
        return self._hyper.deviation(version * self._spec.groups)

    def _batch(self, part: Rollout) -> dict[str, Tensor]:
        """Agents first: [A, N, ...], but what critics see of the world [N, ...]."""
        observation = part.observation
        obs = networks.floats(self._tensor(observation["obs"])).flatten(3)  # [2, N, A, W]
        world = obs
        if "state" in observation:
            world = networks.floats(self._tensor(observation["state"]))
        reward = self._tensor(part.reward[0])
        own = reward.ndim == 2
        batch = {
            "reward": reward.T if own else reward.expand(self._agents, -1),
            "discount": self._tensor(part.extras["discount"][0]),
            "action": self._encoded(self._tensor(part.action[0])).swapaxes(0, 1),
        }
        for i, when in enumerate(("", "next_")):
            batch[when + "obs"] = obs[i].swapaxes(0, 1)
            batch[when + "world"] = world[i].flatten(1)
            for name in ("mask", "alive"):
                if name in observation:
                    batch[when + name] = self._tensor(observation[name][i]).swapaxes(0, 1)
        if own and "alive" in observation:
            # With rewards of its own, an agent that has ended gets nothing more.
            batch["discount"] = batch["discount"] * batch["next_alive"]
        return batch

    def _critic_loss(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The squared temporal-difference error, and the mean value of what was done."""
        with torch.no_grad():
            chosen, _ = self._choose(
                self._target_policies, batch["next_obs"], batch.get("next_mask")
            )
            following = self._values(self._target_critics, batch["next_world"], chosen)
            target = batch["reward"] + batch["discount"] * following
        value = self._values(self._critics, batch["world"], batch["action"])
        alive = batch.get("alive")
        error = functional.mse_loss(value, target, reduction="none")
        return _mean(error, alive), _mean(value.detach(), alive)

    def _policy_loss(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Minus the value of what each agent would do where the others did what they did; and the
        mean entropy of the choices."""
        chosen, output = self._choose(self._policies, batch["obs"], batch.get("mask"))
        actions = torch.where(self._own, chosen.unsqueeze(0), batch["action"].unsqueeze(0))
        value = self._values(self._critics, batch["world"], actions)
        alive, legal = batch.get("alive"), output > NEVER / 2
        size = torch.where(legal, output, 0.0).square().sum(-1) / legal.sum(-1).clamp(min=1)
        loss = -_mean(value, alive) + self._hyper.regularise * _mean(size, alive)
        log_p = torch.log_softmax(output.detach(), -1)
        return loss, _mean(-(log_p.exp() * log_p).sum(-1), alive)

    def _choose(
        self, policies: Sequence[nn.Module], obs: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """What policies would do, as critics see it, and their outputs, both [A, N, n]."""
        output = self._each(policies, obs)
        if isinstance(self._spec.env.action, Continuous):
            return networks.tanh(output) * self._used, output
        if mask is not None:
            output = output.masked_fill(~mask, NEVER)
        noise = self._tensor(_gumbel(self._rng, tuple(output.shape)))
        soft = torch.softmax((output + noise) / self._hyper.temperature, -1)
        hard = functional.one_hot(soft.argmax(-1), self._n)
        return hard + soft - soft.detach(), output

    def _values(self, critics: Sequence[nn.Module], world: Tensor, action: Tensor) -> Tensor:
        """[A, N], of a world [N, S] and actions [A, N, n]; or [A, A, N, n], others by critic."""
        A, N = self._agents, len(world)
        joint = action.movedim(-3, -2).flatten(-2)  # [N, A n] or [A, N, A n]
        seen = torch.cat([world.expand(A, N, -1), joint.expand(A, N, -1)], -1)
        return self._each(critics, seen).squeeze(-1)

    def _each(self, modules: Sequence[nn.Module], x: Tensor) -> Tensor:
        """[A, N, W] through the network of each agent, or through the one of all."""
        if not self._hyper.share:
            return torch.stack([module(of) for module, of in zip(modules, x, strict=True)])
        A, N = x.shape[:2]
        x = torch.cat([x, self._which.unsqueeze(1).expand(A, N, A)], -1)
        output: Tensor = modules[0](x.flatten(0, 1))
        return output.view(A, N, -1)

    def _encoded(self, action: Tensor) -> Tensor:
        """[N, A] or [N, A, n] as critics see them: one of n, or -1 to 1 within the bounds."""
        if not isinstance(self._spec.env.action, Continuous):
            return functional.one_hot(action, self._n).to(torch.float32)
        middle, half = (self._tensor(x) for x in _range(self._spec.env.action))
        inside = (action - middle) / half.clamp(min=1e-8)
        return inside.clamp(-1, 1) * self._used.squeeze(1)

    def _freeze(self, frozen: bool) -> None:
        """Shall critics be left as they are?"""
        for parameter in self._optimizers["critic"].flat.names.values():
            parameter.requires_grad_(not frozen)


def _mean(x: Tensor, alive: Tensor | None) -> Tensor:
    """Over the agents and steps that count."""
    if alive is None:
        return x.mean()
    return torch.where(alive, x, 0.0).sum() / alive.sum().clamp(min=1)


def _used(spec: Spec) -> Array:
    """[A, n]: 1 for numbers of an action that an agent has, 0 for padding."""
    n = _width(spec)
    choices = spec.env.choices or (n,) * len(spec.env.agents)
    return (np.arange(n) < np.array(choices)[:, None]).astype(np.float32)
