"""Networks over columns: an env each or, with several agents, one agent of it.

All agents share a network, or each has its own; it has a memory and is unrolled over whole
rollouts, or sees one row at a time.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from tianji import networks
from tianji.algorithm import Spec
from tianji.distributions import Distribution
from tianji.recurrent import Recurrent
from tianji.sight import Sight
from tianji.types import Array, Rollout

CHUNK = 4096
"""rows that a network answers at once, at most"""
CACHED = 1 << 23
"""numbers in these rows, at most, on a CPU: what layers make of more pictures needs fresh memory,
which takes longer than the convolutions"""


class Each(nn.ModuleList):
    """A network for each agent; its columns are given to it alone."""

    def forward(self, x: Tensor, agent: Tensor) -> Tensor:
        """Rows [n, ...] to [n, outputs]; `agent` [n] says whose they are."""
        whose = [(module, agent == i) for i, module in enumerate(self)]
        answers = [module(x[mine]) for module, mine in whose if mine.any()]
        return _in_order(torch.cat(answers), agent, 0)

    def unroll(self, x: Tensor, state: Tensor, restart: Tensor, agent: Tensor) -> Tensor:
        """Sequences [T, n, ...] to [T, n, outputs]."""
        whose = [(module, agent == i) for i, module in enumerate(self)]
        answers = [
            module(x[:, mine], state[mine], restart[:, mine])[0]
            for module, mine in whose
            if mine.any()
        ]
        return _in_order(torch.cat(answers, 1), agent, 1)


def _in_order(answers: Tensor, agent: Tensor, dim: int) -> Tensor:
    """Answers agent by agent, in the places of those whose they are."""
    return answers.index_select(dim, agent.argsort(stable=True).argsort())


def make_modules(spec: Spec, sight: Sight, over: Distribution) -> dict[str, nn.Module]:
    """The policy network and, where the policy's own does not give it, the value network."""
    built = [_one_of_each(spec, sight, over) for _ in range(sight.columns if sight.separate else 1)]
    if not sight.separate:
        return built[0]
    return {name: Each(modules[name] for modules in built) for name in built[0]}


def _one_of_each(spec: Spec, sight: Sight, over: Distribution) -> dict[str, nn.Module]:
    central = sight.critic
    if sight.memory:
        outputs = over.width + (central is None)  # the last one is the value
        modules: dict[str, nn.Module] = {
            "policy": Recurrent(sight.leaf.shape[0], sight.memory, outputs)
        }
    elif central is not None:
        modules = {"policy": networks.build(spec.network, sight.leaf, over.width)[0]}
    else:
        policy, value = networks.build(spec.network, sight.leaf, over.width, 1)
        return {"policy": policy, "value": value}
    if central is not None:
        modules["value"] = networks.build(spec.network, central, 1)[0]
    return modules


def initialise(modules: Mapping[str, nn.Module], width: int, rng: np.random.Generator) -> None:
    """Nearly equal probabilities for all actions, and values near 0."""
    for name, module in modules.items():
        for one in module if isinstance(module, Each) else [module]:
            if isinstance(one, Recurrent):
                one.initialise(rng, last=0.01)
                with torch.no_grad():
                    one.head.weight[width:] *= 100.0
            else:
                networks.initialise(one, rng, 2**0.5, last=0.01 if name == "policy" else 1.0)


def fold(part: Rollout, agents: int) -> Rollout:
    """A rollout with a column for each agent of an env, [T, B * A, ...]; 0 agents: as it is.

    A team's reward is each agent's, and an episode ends for all. Estimates go on through the rows
    in which an agent does not act: what follows for the others is still its return."""
    if not agents:
        return part

    def each(array: Array) -> Array:
        return array.reshape(len(array), -1, *array.shape[3:])

    def repeated(array: Array) -> Array:
        return np.repeat(array, agents, axis=1)

    observation = {k: each(v) for k, v in part.observation.items() if k in ("obs", "mask", "alive")}
    return Rollout(
        observation=observation,
        action=each(part.action),
        reward=each(part.reward) if part.reward.ndim > 2 else repeated(part.reward),
        terminated=repeated(part.terminated),
        valid=repeated(part.valid),
        extras={k: each(v) for k, v in part.extras.items()},
        once={k: v.reshape(-1, *v.shape[2:]) for k, v in part.once.items()},
        head=part.head,
        episode_table=part.episode_table,
        versions=part.versions,
    )


def ask(module: nn.Module, x: Tensor, agent: Tensor | None) -> Tensor:
    answer: Tensor = module(x) if agent is None else module(x, agent)
    return answer


def unroll(
    module: nn.Module, x: Tensor, state: Tensor, restart: Tensor, agent: Tensor | None
) -> Tensor:
    if isinstance(module, Each) and agent is not None:
        return module.unroll(x, state, restart, agent)
    output: Tensor = module(x, state, restart)[0]
    return output


def chunked(module: nn.Module, x: Tensor, agent: Tensor | None) -> Tensor:
    """A feed-forward network over [R, N, ...], a chunk at a time: [R, N, n]."""
    rows = CHUNK
    if x.device.type == "cpu":
        rows = min(CHUNK, max(1, CACHED // max(1, x.shape[2:].numel())))
    parts = torch.split(x.flatten(0, 1), rows)
    if agent is None:
        answers = [module(part) for part in parts]
    else:
        whose = torch.split(agent.repeat(len(x)), rows)
        answers = [module(part, mine) for part, mine in zip(parts, whose, strict=True)]
    return torch.cat(answers).view(*x.shape[:2], -1)
