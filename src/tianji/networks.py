"""Networks for the learner in torch, and the same networks for the actor in numpy where faster."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from tianji.algorithm import Network
from tianji.errors import Refusal
from tianji.types import Array, Leaf

SMALLEST_PICTURE = 36
"""pixels a side that three convolutions need"""
FEATURES = 512
"""what convolutions give to the last layer"""


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


def tanh(x: Tensor) -> Tensor:
    if x.device.type == "cpu" and x.dtype == torch.float32:
        return _NumpyTanh.apply(x)  # type: ignore[no-any-return, no-untyped-call]
    return torch.tanh(x)


BYTE = 1.0 / 255.0
"""uint8 observations become 0..1 where a network takes them in; floats stay as they are"""


def floats(x: Tensor) -> Tensor:
    """Any numbers as float32, uint8 in 0..1."""
    if x.dtype == torch.float32:
        return x
    return x.to(torch.float32) * BYTE if x.dtype == torch.uint8 else x.to(torch.float32)


class Picture(nn.Module):
    """Pictures, channels first or last, to float32 [B, C, H, W]."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.last = shape[-1] < shape[0]
        self.channels = shape[-1] if self.last else shape[0]

    def forward(self, x: Tensor) -> Tensor:
        if self.last:
            x = x.permute(0, 3, 1, 2)
        return floats(x)


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


class MLP(nn.Module):
    """A multi-layer perceptron, any observation to `outputs` numbers. One call for all layers: for
    small networks, a call of a module costs as much as its work."""

    def __init__(self, network: Network, observation: Leaf, outputs: int) -> None:
        super().__init__()
        widths = [int(np.prod(observation.shape)), *network.hidden, outputs]
        self._order = tuple(nn.Linear(n, m) for n, m in itertools.pairwise(widths))
        self.layers = nn.ModuleList(self._order)
        self._activation = tanh if network.activation == "tanh" else torch.relu

    def forward(self, x: Tensor) -> Tensor:
        x = floats(x).reshape(len(x), -1)
        for layer in self._order[:-1]:
            x = self._activation(functional.linear(x, layer.weight, layer.bias))
        return functional.linear(x, self._order[-1].weight, self._order[-1].bias)


def convolutions(observation: Leaf) -> nn.Sequential:
    """Pictures to 512 features, as in Mnih et al. 2015."""
    picture = Picture(observation.shape)
    layers = nn.Sequential(
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
        width = layers(torch.zeros(1, *observation.shape)).shape[1]
    return nn.Sequential(*layers, nn.Linear(width, FEATURES), nn.ReLU())


def build(network: Network, observation: Leaf, *outputs: int) -> list[nn.Module]:
    """A network for each number of outputs; those for pictures share their convolutions."""
    if kind(network, observation) == "mlp":
        return [MLP(network, observation, n) for n in outputs]
    body = convolutions(observation)
    return [nn.Sequential(body, nn.Linear(FEATURES, n)) for n in outputs]


def initialise(module: nn.Module, rng: np.random.Generator, gain: float, last: float) -> None:
    """Orthogonal weights of this gain, and `last` for the last layer; zero biases."""
    weights = [p for p in module.parameters() if p.ndim >= 2]
    for parameter in module.parameters():
        if parameter.ndim < 2:
            nn.init.zeros_(parameter)
            continue
        rows, columns = parameter.shape[0], parameter[0].numel()
        normal = rng.standard_normal((max(rows, columns), min(rows, columns)))
        q, r = np.linalg.qr(normal)
        q *= np.sign(np.diag(r)) * (last if parameter is weights[-1] else gain)
        q = q if rows >= columns else q.T
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(q).reshape(parameter.shape))
    for layer in module.modules():
        if isinstance(layer, NoisyLinear):
            layer.begin()


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


def compute(network: Network, module: nn.Module, x: Tensor) -> Tensor:
    """What a network of `build` gives to a trainer, the quicker way on a CPU: convolutions take
    channels last and compute at the config's precision, the last layer in float32."""
    if not isinstance(module, nn.Sequential) or x.device.type != "cpu":
        return module(x)  # type: ignore[no-any-return]
    body, last = module
    return last(convolve(network, body, x))  # type: ignore[no-any-return]


def convolve(network: Network, body: nn.Module, x: Tensor) -> Tensor:
    """The features of pictures, in float32."""
    picture, *layers = body.children()
    x = picture(x).contiguous(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16, enabled=network.precision == "bfloat16"):
        for layer in layers:
            x = layer(x)
    return x.float()


class NoisyLinear(nn.Module):
    """A linear layer with factorised Gaussian noise of learnt size (Fortunato et al. 2018):
    y = (W + S * out into^T) x + b + s * out."""

    def __init__(self, n: int, m: int, sigma: float) -> None:
        """The noise begins with a deviation of `sigma` over the square root of n."""
        super().__init__()
        self.inputs, self.outputs = n, m
        self._sigma = sigma
        self.weight_sigma = nn.Parameter(torch.empty(m, n))
        self.bias_sigma = nn.Parameter(torch.empty(m))
        self.weight = nn.Parameter(torch.zeros(m, n))
        self.bias = nn.Parameter(torch.zeros(m))
        self.begin()

    def begin(self) -> None:
        """Let the noise have its first size."""
        with torch.no_grad():
            for sigma in (self.weight_sigma, self.bias_sigma):
                sigma.fill_(self._sigma / self.inputs**0.5)

    def forward(self, x: Tensor, into: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """`into` [..., n] and `out` [..., m] are the noise, of all rows or of each; without them,
        there is none."""
        y = functional.linear(x, self.weight, self.bias)
        if into is None or out is None:
            return y
        # (S * out into^T) x = out * (S (into * x)), which needs no weights for each row.
        noise = functional.linear(into * x, self.weight_sigma, self.bias_sigma)
        return torch.addcmul(y, out, noise)


def spread_noise(rng: np.random.Generator, *shape: int) -> Array:
    """sign(x) sqrt(|x|) of normal numbers x."""
    x = rng.standard_normal(shape, np.float32)
    return np.copysign(np.sqrt(np.abs(x)), x)


class Noisy(nn.Module):
    """A network of noisy layers: those after the convolutions, or all of an mlp but the first."""

    def __init__(self, network: Network, observation: Leaf, outputs: int, sigma: float) -> None:
        super().__init__()
        self._network = network
        self.pictures = kind(network, observation) == "cnn"
        if self.pictures:
            *body, features, _ = convolutions(observation)
            assert isinstance(features, nn.Linear)
            self.body: nn.Module = nn.Sequential(*body)
            widths = [features.in_features, features.out_features, outputs]
        else:
            if not network.hidden:
                raise Refusal(
                    "algorithm.noisy needs a hidden layer, and network.hidden has none, so there "
                    "is nothing to put noise on. Set network.hidden = [64]."
                )
            first, *hidden = network.hidden
            self.body = MLP(replace(network, hidden=()), observation, first)
            widths = [first, *hidden, outputs]
        self._order = tuple(NoisyLinear(n, m, sigma) for n, m in itertools.pairwise(widths))
        self.layers = nn.ModuleList(self._order)
        relu = self.pictures or network.activation == "relu"
        self._activation = torch.relu if relu else tanh

    def forward(self, x: Tensor, rng: np.random.Generator | None = None) -> Tensor:
        """With `rng`, new noise is drawn for each row; without, there is none. One for all rows, as
        in the paper, has the same mean, and gradients that are many times as noisy."""
        if self.pictures:
            x = convolve(self._network, self.body, x)
        else:
            x = self._activation(self.body(x))
        for i, layer in enumerate(self._order):
            x = self._activation(x) if i else x
            if rng is None:
                x = layer(x)
            else:
                widths = layer.inputs, layer.outputs
                noise = (torch.from_numpy(spread_noise(rng, len(x), n)) for n in widths)
                x = layer(x, *(each.to(x.device) for each in noise))
        return x


class NoisyInference:
    """A noisy network that only answers; each row has noise of its own."""

    def __init__(self, network: Network, observation: Leaf, module: Noisy, prefix: str) -> None:
        self._relu = module.pictures or network.activation == "relu"
        self._pictures = module.pictures
        self._body = inference(network, observation, module.body, f"{prefix}.body")
        self._names = [f"{prefix}.layers.{i}" for i in range(len(module.layers))]
        self._layers: list[tuple[Array, ...]] = []

    def load(self, params: Mapping[str, Array]) -> None:
        self._body.load(params)
        kinds = ("weight", "bias", "weight_sigma", "bias_sigma")
        self._layers = [tuple(params[f"{name}.{k}"].T for k in kinds) for name in self._names]

    def __call__(self, x: Array, rng: np.random.Generator | None) -> Array:
        x = self._body(x)
        for i, (weight, bias, weight_sigma, bias_sigma) in enumerate(self._layers):
            if i or not self._pictures:
                x = np.maximum(x, 0) if self._relu else np.tanh(x)
            y: Array = x @ weight + bias
            if rng is not None:
                into, out = spread_noise(rng, *x.shape), spread_noise(rng, *y.shape)
                y += out * ((into * x) @ weight_sigma + bias_sigma)
            x = y
        return x
