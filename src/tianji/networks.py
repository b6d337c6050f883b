"""Networks for the learner in torch, and the same networks for the actor in numpy where faster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from tianji.algorithm import Network
from tianji.errors import Refusal
from tianji.types import Array, Leaf

SMALLEST_PICTURE = 36
"""pixels a side that three convolutions need"""


class _NumpyTanh(torch.autograd.Function):
    """numpy's vectorised tanh takes a seventh of the time of torch's on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.from_numpy(np.tanh(x.detach().numpy()))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return torch.ops.aten.tanh_backward(gradient, y)  # type: ignore[no-any-return]


class Tanh(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and x.dtype == torch.float32:
            return _NumpyTanh.apply(x)  # type: ignore[no-any-return, no-untyped-call]
        return torch.tanh(x)


BYTE = 1.0 / 255.0
"""uint8 observations become 0..1 where a network takes them in; floats stay as they are"""


class Floats(nn.Module):
    """Any numbers to float32, uint8 in 0..1."""

    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.float32) * BYTE if x.dtype == torch.uint8 else x.to(torch.float32)


class Picture(Floats):
    """Pictures, channels first or last, to float32 [B, C, H, W]."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.last = shape[-1] < shape[0]
        self.channels = shape[-1] if self.last else shape[0]

    def forward(self, x: Tensor) -> Tensor:
        if self.last:
            x = x.permute(0, 3, 1, 2)
        return super().forward(x)


_ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": Tanh, "relu": nn.ReLU}


def kind(network: Network, observation: Leaf) -> str:
    """Which network fits: the config's word, or by the shape of the observation."""
    picture = len(observation.shape) == 3 and sorted(observation.shape)[1] >= SMALLEST_PICTURE
    if network.kind == "auto":
        return "cnn" if picture and observation.dtype == np.uint8 else "mlp"
    if network.kind == "cnn" and not picture:
        raise Refusal(
            f'network.kind = "cnn" needs pictures of {SMALLEST_PICTURE} pixels or more a side; '
            f'this env observes an array of shape {observation.shape}. Set network.kind = "mlp".'
        )
    return network.kind


def body(network: Network, observation: Leaf) -> tuple[nn.Sequential, int]:
    """Everything before the heads, and the width of what it gives."""
    layers: list[nn.Module] = []
    activation = _ACTIVATIONS[network.activation]
    if kind(network, observation) == "cnn":
        picture = Picture(observation.shape)
        convolutions = nn.Sequential(
            picture,
            nn.Conv2d(picture.channels, 32, 8, 4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, 2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, 1),
            nn.ReLU(),
            nn.Flatten(),
        )
        with torch.no_grad():
            width = convolutions(torch.zeros(1, *observation.shape)).shape[1]
        return nn.Sequential(*convolutions, nn.Linear(width, 512), nn.ReLU()), 512
    width = int(np.prod(observation.shape))
    if observation.dtype != np.float32:
        layers.append(Floats())
    if len(observation.shape) != 1:
        layers.append(nn.Flatten())
    for hidden in network.hidden:
        layers += [nn.Linear(width, hidden), activation()]
        width = hidden
    return nn.Sequential(*layers), width


def initialise(module: nn.Module, rng: np.random.Generator, gain: float) -> None:
    """Orthogonal weights of this gain and zero biases, from the caller's generator."""
    for parameter in module.parameters():
        if parameter.ndim < 2:
            nn.init.zeros_(parameter)
            continue
        rows, columns = parameter.shape[0], parameter[0].numel()
        normal = rng.standard_normal((max(rows, columns), min(rows, columns)))
        q, r = np.linalg.qr(normal)
        q *= np.sign(np.diag(r))
        q = q if rows >= columns else q.T
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(gain * q).reshape(parameter.shape))


class Inference(Protocol):
    """A network that only answers: [B, ...] to [B, n], both numpy."""

    def load(self, params: Mapping[str, Array]) -> None: ...

    def __call__(self, x: Array) -> Array: ...


class NumpyMLP:
    """A multi-layer perceptron in numpy: two to three times as fast as torch for small B."""

    def __init__(self, activation: str, names: list[str]) -> None:
        self._names = names
        self._activation: Any = np.tanh if activation == "tanh" else None
        self._layers: list[tuple[Array, Array]] = []
        self._hidden: list[Array] = []

    def load(self, params: Mapping[str, Array]) -> None:
        self._layers = [
            (params[f"{name}.weight"].T, params[f"{name}.bias"]) for name in self._names
        ]
        self._hidden = []

    def __call__(self, x: Array) -> Array:
        x = x.reshape(len(x), -1)
        if x.dtype != np.float32:
            x = x.astype(np.float32) * np.float32(BYTE if x.dtype == np.uint8 else 1.0)
        if not self._hidden or len(self._hidden[0]) != len(x):
            self._hidden = [np.empty((len(x), w.shape[1]), np.float32) for w, _ in self._layers]
        last = len(self._layers) - 1
        for i, ((weight, bias), out) in enumerate(zip(self._layers, self._hidden, strict=True)):
            np.matmul(x, weight, out=out)
            np.add(out, bias, out=out)
            if i < last:
                if self._activation is None:
                    np.maximum(out, 0.0, out=out)
                else:
                    self._activation(out, out=out)
            x = out
        return x


class TorchInference:
    """Any network, in torch."""

    def __init__(self, module: nn.Module, prefix: str, device: str = "cpu") -> None:
        self._module = module.to(device)
        self._prefix = prefix
        self._device = device

    def load(self, params: Mapping[str, Array]) -> None:
        with torch.no_grad():
            for name, parameter in self._module.named_parameters():
                parameter.copy_(torch.from_numpy(params[f"{self._prefix}.{name}"]))

    def __call__(self, x: Array) -> Array:
        with torch.inference_mode():
            answer = self._module(torch.from_numpy(x).to(self._device))
            return answer.cpu().numpy()  # type: ignore[no-any-return]


def inference(
    network: Network, observation: Leaf, module: nn.Module, prefix: str, device: str = "cpu"
) -> Inference:
    """The quicker way to answer with this network: numpy for an mlp on a CPU, else torch."""
    if kind(network, observation) == "mlp" and device == "cpu":
        linear = [name for name, m in module.named_modules() if isinstance(m, nn.Linear)]
        return NumpyMLP(network.activation, [f"{prefix}.{name}" for name in linear])
    return TorchInference(module, prefix, device)


def shapes(modules: Mapping[str, nn.Module]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all parameters of named modules."""
    return {
        f"{prefix}.{name}": tuple(p.shape)
        for prefix, module in modules.items()
        for name, p in module.named_parameters()
    }
