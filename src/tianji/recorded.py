"""An update that a GPU is told once and then repeats: pinned inputs, and a graph of its kernels."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from tianji.types import Array

Tensors = Mapping[str, Tensor]

EAGER = 3
"""calls before recording, in which libraries choose their kernels and memory settles"""


WORTH_PINNING = 1 << 16
"""bytes; less is copied sooner"""


class Recorded:
    """A function of arrays that are alike in shape at every call, computed on a device.

    On a GPU the arrays are pinned where they are, if they come in the same place at every call, and
    after a few calls the kernels are recorded as one graph: what Python and autograd take for each
    of them, most of a small network's update, is paid once. What it returns is overwritten by the
    next call. A function that is recorded must be the same every time: no random numbers, no choice
    by what a tensor holds, no other inputs that change, and all that it changes stays where it is
    in memory.
    """

    def __init__(
        self, function: Callable[[Tensors], tuple[Tensor, ...]], device: str, records: bool
    ) -> None:
        """Without `records`, a GPU is told each kernel at every call."""
        self._function = function
        self._device = torch.device(device)
        self._records = records
        self._ways: dict[str, _Way] = {}
        self._inputs: dict[str, Tensor] = {}
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: tuple[Tensor, ...] = ()

    def __call__(self, arrays: Mapping[str, Array]) -> tuple[Tensor, ...]:
        if self._device.type == "cpu":
            return self._function({name: torch.from_numpy(a) for name, a in arrays.items()})
        self._move(arrays)
        if not self._records:
            return self._function(self._inputs)
        if self._graph is None and self._calls < EAGER:
            self._calls += 1
            return self._aside()
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._outputs = self._function(self._inputs)
        self._graph.replay()
        return self._outputs

    def _move(self, arrays: Mapping[str, Array]) -> None:
        """Bring the arrays to the device, once the call before has read what was there."""
        torch.cuda.current_stream().synchronize()
        for name, array in arrays.items():
            if name not in self._ways:
                self._ways[name] = _Way(array, self._device)
                self._inputs[name] = self._ways[name].input
            self._ways[name].move(array)

    def _aside(self) -> tuple[Tensor, ...]:
        """Compute on a stream of its own, as recording will."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            outputs = self._function(self._inputs)
        torch.cuda.current_stream().wait_stream(stream)
        return outputs


class _Way:
    """Of one input to the device: from its own memory while it comes in the same place, else by a
    copy; either is pinned."""

    def __init__(self, array: Array, device: torch.device) -> None:
        self._theirs = array if self._pin(array) else None
        self._copy: Tensor | None = None
        self.input = torch.from_numpy(np.empty_like(array, order="C")).to(device)

    def move(self, array: Array) -> None:
        theirs = self._theirs
        if theirs is not None and array.ctypes.data == theirs.ctypes.data:
            source = torch.from_numpy(array)
        else:
            if self._copy is None:
                self._copy = torch.empty_like(self.input, device="cpu", pin_memory=True)
            np.copyto(self._copy.numpy(), array)
            source = self._copy
        self.input.copy_(source, non_blocking=True)

    def _pin(self, array: Array) -> bool:
        if array.nbytes < WORTH_PINNING or not array.flags.c_contiguous:
            return False
        if not torch.from_numpy(array).is_pinned():  # by nobody else
            cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(cudart.cudaHostRegister(array.ctypes.data, array.nbytes, 0))
            weakref.finalize(self, _unpin, array)
        return True


def _unpin(array: Array) -> None:
    torch.cuda.cudart().cudaHostUnregister(array.ctypes.data)  # type: ignore[no-untyped-call]
