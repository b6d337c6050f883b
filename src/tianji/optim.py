"""The optimizer seam: backward, clip and step, over parameters that lie in one flat buffer."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from tianji.role import State
from tianji.types import Array, Leaves


class Flat:
    """The parameters of named modules, moved into one buffer that the modules go on using."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.names: dict[str, nn.Parameter] = {}
        for prefix, module in modules.items():
            for name, parameter in module.named_parameters():
                # A layer that two modules share has one place, under the first one's name.
                if all(parameter is not known for known in self.names.values()):
                    self.names[f"{prefix}.{name}"] = parameter
        device = next(iter(self.names.values())).device
        self.data = torch.empty(sum(p.numel() for p in self.names.values()), device=device)
        for parameter, view in self._views(self.data):
            view.copy_(parameter.detach())
            parameter.data = view

    def gradient(self) -> Tensor:
        """One buffer for all gradients, into which backward will add."""
        gradient = torch.zeros_like(self.data)
        for parameter, view in self._views(gradient):
            parameter.grad = view
        return gradient

    def arrays(self) -> Leaves:
        """The parameters by name, as arrays; views on a CPU."""
        return {name: p.detach().cpu().numpy() for name, p in self.names.items()}

    def array(self) -> Array:
        """All parameters in one array; a view on a CPU."""
        return self.data.detach().cpu().numpy()

    def copies(self) -> Leaves:
        return {name: array.copy() for name, array in self.arrays().items()}

    def load(self, arrays: Mapping[str, object]) -> None:
        with torch.no_grad():
            for name, parameter in self.names.items():
                parameter.copy_(torch.from_numpy(np.asarray(arrays[name])))

    def _views(self, buffer: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
        views, offset = [], 0
        for parameter in self.names.values():
            end = offset + parameter.numel()
            views.append((parameter, buffer[offset:end].view(parameter.shape)))
            offset = end
        return views


class Optimizer:
    """Adam over several modules. One buffer for all parameters and one for all gradients make
    zeroing, clipping and stepping one operation each, whatever the number of layers."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        max_norm: float = 0.0,
        eps: float = 1e-8,
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> None:
        self.flat = Flat(modules)
        self._gradient = self.flat.gradient()
        self._max_norm = max_norm
        self._eps = eps
        self._betas = betas
        self._m = torch.zeros_like(self.flat.data)
        self._v = torch.zeros_like(self.flat.data)
        self._steps = torch.zeros((), device=self.flat.data.device)

    def step(self, loss: Tensor, learning_rate: float) -> Tensor:
        """Backward, clip, step; the norm of the gradient before clipping."""
        self._gradient.zero_()
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            norm: Tensor = torch.linalg.vector_norm(self._gradient)
            if self._max_norm > 0:
                self._gradient.mul_((self._max_norm / (norm + 1e-6)).clamp_(max=1.0))
            self._steps.add_(1)
            torch._fused_adam_(
                [self.flat.data],
                [self._gradient],
                [self._m],
                [self._v],
                [],
                [self._steps],
                lr=learning_rate,
                beta1=self._betas[0],
                beta2=self._betas[1],
                weight_decay=0.0,
                eps=self._eps,
                amsgrad=False,
                maximize=False,
            )
        return norm

    def finite(self) -> bool:
        """Are all parameters finite?"""
        return bool(torch.isfinite(self.flat.data.sum()))

    def state(self) -> State:
        moments = {"m": self._m, "v": self._v, "steps": self._steps}
        return {
            "parameters": self.flat.copies(),
            "moments": {name: t.cpu().numpy().copy() for name, t in moments.items()},
        }

    def load_state(self, state: State) -> None:
        self.flat.load(state["parameters"])
        for name, tensor in (("m", self._m), ("v", self._v), ("steps", self._steps)):
            tensor.copy_(torch.from_numpy(np.asarray(state["moments"][name])))
