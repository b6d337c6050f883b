"""A network with a memory, in torch for the learner and in numpy for the actor."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from tianji.networks import orthogonal
from tianji.types import Array


class Recurrent(nn.Module):
    """A layer, a gated recurrent unit (Cho et al. 2014) and a last layer, over rows of time."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.encoder = nn.Linear(inputs, hidden)
        self.memory = nn.GRU(hidden, hidden)
        self.head = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor, state: Tensor, restart: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs [T, N, n] and the state after the last row, from x [T, N, inputs], the state
        before row 0 [N, hidden], and restart [T, N] bool: before row t, the state becomes zero."""
        x = torch.relu(self.encoder(x))
        # One call for all rows between two restarts: a call for every row takes 1.7 times as long.
        cuts = restart.any(dim=1).nonzero().flatten().tolist()
        edges = [0, *(t for t in cuts if t > 0), len(x)]
        pieces = []
        for begin, end in itertools.pairwise(edges):
            if begin in cuts:
                state = state.masked_fill(restart[begin].unsqueeze(-1), 0.0)
            piece, last = self.memory(x[begin:end], state.unsqueeze(0))
            state = last.squeeze(0)
            pieces.append(piece)
        return self.head(torch.cat(pieces) if len(pieces) > 1 else pieces[0]), state

    def initialise(self, rng: np.random.Generator, last: float) -> None:
        """Orthogonal weights, those of the last layer scaled by `last`; zero biases."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.ndim < 2:
                    parameter.zero_()
                    continue
                gain = {"encoder.weight": 2**0.5, "head.weight": last}.get(name, 1.0)
                rows = self.hidden if name.startswith("memory") else len(parameter)
                for gate in parameter.view(-1, rows, parameter.shape[1]):
                    gate.copy_(torch.from_numpy(gain * orthogonal(rng, rows, gate.shape[1])))


class NumpyRecurrent:
    """The same network in numpy, for one row of time: in a third (12 rows) to two thirds (192) of
    torch's time."""

    def __init__(self, prefix: str) -> None:
        """`prefix`: the module's name among the params that `load` is given."""
        self._prefix = prefix

    def load(self, params: Mapping[str, Array]) -> None:
        def layer(weight: str, bias: str) -> tuple[Array, Array]:
            weights = np.ascontiguousarray(params[f"{self._prefix}.{weight}"].T)
            return weights, params[f"{self._prefix}.{bias}"].copy()

        self._encoder = layer("encoder.weight", "encoder.bias")
        self._input = layer("memory.weight_ih_l0", "memory.bias_ih_l0")
        self._recur = layer("memory.weight_hh_l0", "memory.bias_hh_l0")
        self._head = layer("head.weight", "head.bias")

    def __call__(self, x: Array, state: Array) -> tuple[Array, Array]:
        """Outputs [N, n] and the next state, from x [N, inputs] and the state [N, hidden]."""
        H = state.shape[1]
        x = _linear(x, self._encoder)
        np.maximum(x, 0.0, out=x)
        x, recur = _linear(x, self._input), _linear(state, self._recur)
        gates = x[:, : 2 * H]
        gates += recur[:, : 2 * H]
        gates *= 0.5  # a sigmoid is half a tanh of half its argument, and half
        np.tanh(gates, out=gates)
        gates += 1.0
        gates *= 0.5
        reset, keep, new = gates[:, :H], gates[:, H:], x[:, 2 * H :]
        reset *= recur[:, 2 * H :]
        new += reset
        np.tanh(new, out=new)
        following = new + keep * (state - new)
        return _linear(following, self._head), following


def _linear(x: Array, layer: tuple[Array, Array]) -> Array:
    weight, bias = layer
    out: Array = x @ weight
    out += bias
    return out
