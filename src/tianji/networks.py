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
from tianji.types import Array, Layout, Leaf, leaf

SMALLEST_PICTURE = 8
"""pixels a side that convolutions need"""
SMALLEST_LARGE_PICTURE = 36
"""pixels a side that the three convolutions for large pictures need"""
FEATURES, SMALL_FEATURES = 512, 128
"""what convolutions give to the last layer, those for small pictures too"""


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
    """Pictures, channels first or last, or stacks of them, to [B, C, H, W] of a floating type."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        *stack, first, middle, last = shape
        self.stacks = bool(stack)
        self.last = last < first
        self.sides = (first, middle) if self.last else (middle, last)
        """height and width"""
        self.channels = (last if self.last else first) * (stack[0] if stack else 1)
        self.dtype = torch.float32
        self.scaled = False
        """do the weights that follow turn bytes into 0..1?"""

    def forward(self, x: Tensor) -> Tensor:
        if self.last:
            x = x.movedim(-1, -3)
        if self.stacks:
            x = x.flatten(1, 2)
        if not self.scaled and self.dtype == torch.float32:
            return floats(x)
        order = torch.preserve_format if self.dtype == torch.float32 else torch.channels_last
        y = x.to(self.dtype, memory_format=order)
        return y / BYTE if self.scaled and x.dtype != torch.uint8 else y


def _sides(observation: Leaf) -> int:
    """Pixels of the shorter side of a picture, or of those of a stack; 0: it is none."""
    shape = observation.shape[1:] if len(observation.shape) == 4 else observation.shape
    return sorted(shape)[1] if len(shape) == 3 else 0


def kind(network: Network, observation: Leaf) -> str:
    """Which network fits: the config's word, or by the shape of the observation."""
    picture = _sides(observation) >= SMALLEST_PICTURE
    if network.kind == "auto":
        return "cnn" if picture and observation.dtype in (np.uint8, np.bool_) else "mlp"
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
        x = floats(x).reshape(len(x), self._order[0].in_features)
        for layer in self._order[:-1]:
            x = self._activation(functional.linear(x, layer.weight, layer.bias))
        return functional.linear(x, self._order[-1].weight, self._order[-1].bias)


class Features(nn.Sequential):
    """Convolutions of pictures, to `width` float32 numbers: large ones as in Mnih et al. 2015,
    small ones as in Young and Tian 2019. On a CPU they take channels last and compute at the
    network's precision."""

    def __init__(self, network: Network, observation: Leaf, whole: bool = True) -> None:
        """`whole`: with the linear layer that follows the convolutions."""
        picture = Picture(observation.shape)
        large = _sides(observation) >= SMALLEST_LARGE_PICTURE
        layers: list[nn.Module]
        if large:
            layers = [
                nn.Conv2d(picture.channels, 32, 8, 4),
                nn.ReLU(),
                nn.Conv2d(32, 64, 4, 2),
                nn.ReLU(),
                nn.Conv2d(64, 64, 3, 1),
                nn.ReLU(),
            ]
        else:
            layers = [nn.Conv2d(picture.channels, 16, 3, 1), nn.ReLU()]
        width = FEATURES if large else SMALL_FEATURES
        channels, sides = picture.channels, np.array(picture.sides)
        for layer in layers:
            if isinstance(layer, nn.Conv2d):  # no padding: by counting, as modules may be on meta
                sides = (sides - layer.kernel_size) // np.array(layer.stride) + 1
                channels = layer.out_channels
        flat = channels * int(sides.prod())
        layers = [picture, *layers, nn.Flatten()]
        after = [nn.Linear(flat, width), nn.ReLU()] if whole else []
        super().__init__(*layers, *after)
        self.width, self.following = (width if whole else flat), width
        self._channels_last = True
        self._autocasts = network.precision == "bfloat16"

    def forward(self, x: Tensor) -> Tensor:
        picture, *layers = self
        x = picture(x)
        on_cpu = x.device.type == "cpu"
        if on_cpu and self._channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast("cpu", torch.bfloat16, enabled=on_cpu and self._autocasts):
            for layer in layers:
                x = layer(x)
        return x.float()

    def quicken(self, precision: str, scaled: bool) -> None:
        """For answers alone: hold weights at this precision; if `scaled`, take for granted that
        `first` was made smaller, so that bytes need not be."""
        picture = self[0]
        assert isinstance(picture, Picture)
        picture.scaled = scaled
        self._autocasts, self._channels_last = False, precision != "float32"
        if precision == "bfloat16":
            picture.dtype = torch.bfloat16
            self.to(torch.bfloat16)
            for parameter in self.parameters():
                if parameter.ndim == 4:
                    parameter.data = parameter.data.to(memory_format=torch.channels_last)

    @property
    def first(self) -> Tensor:
        """The weights that see the pictures."""
        weight = self[1].weight
        assert isinstance(weight, Tensor)
        return weight


def build(network: Network, observation: Leaf, *outputs: int) -> list[nn.Module]:
    """A network for each number of outputs; those for pictures share their convolutions."""
    if kind(network, observation) == "mlp":
        return [MLP(network, observation, n) for n in outputs]
    body = Features(network, observation)
    return [nn.Sequential(body, nn.Linear(body.width, n)) for n in outputs]


def together(x: Tensor, *modules: nn.Module) -> list[Tensor]:
    """What each of these answers to x; the convolutions that they share are computed once."""
    pairs = [m for m in modules if isinstance(m, nn.Sequential) and len(m) == 2]
    if len(pairs) < len(modules) or len({id(pair[0]) for pair in pairs}) > 1:
        return [module(x) for module in modules]
    features = pairs[0][0](x)
    return [pair[1](features) for pair in pairs]


class Critics(nn.Module):
    """Values of continuous actions by several networks at once, [N, ...] and [N, d] to [heads, N].

    Their layers are multiplied as one batch, which is quicker than one network after the other.
    Pictures pass convolutions first, which all heads share."""

    def __init__(self, network: Network, observation: Leaf, width: int, heads: int = 2) -> None:
        super().__init__()
        pictures = kind(network, observation) == "cnn"
        self.body = Features(network, observation) if pictures else None
        features = int(np.prod(observation.shape)) if self.body is None else self.body.width
        widths = [features + width, *network.hidden, 1]
        pairs = list(itertools.pairwise(widths))
        self.weights = nn.ParameterList(torch.zeros(heads, n, m) for n, m in pairs)
        self.biases = nn.ParameterList(torch.zeros(heads, 1, m) for _, m in pairs)
        self._layers = tuple(zip(self.weights, self.biases, strict=True))
        self._activation = tanh if network.activation == "tanh" else torch.relu

    def forward(self, observation: Tensor, action: Tensor, heads: int | None = None) -> Tensor:
        """By all networks, or the first `heads` of them."""
        seen = floats(observation) if self.body is None else self.body(observation)
        x = torch.cat([seen.reshape(len(seen), -1), action], -1)
        x = x.expand(self.weights[0][:heads].shape[0], -1, -1)  # [heads, N, features + d]
        for weight, bias in self._layers[:-1]:
            x = self._activation(torch.baddbmm(bias[:heads], x, weight[:heads]))
        weight, bias = self._layers[-1]
        return torch.baddbmm(bias[:heads], x, weight[:heads]).squeeze(-1)

    def initialise(self, rng: np.random.Generator, gain: float, last: float) -> None:
        """As the function of this name, every head with weights of its own."""
        if self.body is not None:
            initialise(self.body, rng, gain, last=gain)
        with torch.no_grad():
            for weight in self.weights:
                of = last if weight is self.weights[-1] else gain
                for head in weight:
                    head.copy_(torch.from_numpy(orthogonal(rng, *head.shape) * of))


def orthogonal(rng: np.random.Generator, rows: int, columns: int) -> Array:
    """A random matrix whose rows, or columns, are orthogonal and of length 1."""
    normal = rng.standard_normal((max(rows, columns), min(rows, columns)))
    q, r = np.linalg.qr(normal)
    q *= np.sign(np.diag(r))
    return q if rows >= columns else q.T


def initialise(module: nn.Module, rng: np.random.Generator, gain: float, last: float) -> None:
    """Orthogonal weights of this gain, and `last` for the last layer; zero biases."""
    weights = [p for p in module.parameters() if p.ndim >= 2]
    for parameter in module.parameters():
        if parameter.ndim < 2:
            nn.init.zeros_(parameter)
            continue
        q = orthogonal(rng, parameter.shape[0], parameter[0].numel())
        q *= last if parameter is weights[-1] else gain
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
    """Any network, in torch. Convolutions compute at the network's precision, what follows them in
    float32: values that differ by little must stay different."""

    def __init__(
        self,
        module: nn.Module,
        prefix: str,
        precision: str = "float32",
        scaled: bool = False,
    ) -> None:
        """`scaled`: pictures are bytes, and the first weights make them 0..1."""
        self._module = module
        self._prefix = prefix
        features = [m for m in module.modules() if isinstance(m, Features)]
        for each in features:
            each.quicken(precision, scaled)
        self._scaled = [each.first for each in features if scaled]

    def load(self, params: Mapping[str, Array]) -> None:
        with torch.no_grad():
            for name, parameter in self._module.named_parameters():
                array = torch.from_numpy(params[f"{self._prefix}.{name}"])
                scaled = any(parameter is first for first in self._scaled)
                parameter.copy_(array * BYTE if scaled else array)

    def __call__(self, x: Array) -> Array:
        with torch.inference_mode():
            return self._module(torch.from_numpy(x)).numpy()  # type: ignore[no-any-return]


def inference(network: Network, observation: Leaf, module: nn.Module, prefix: str) -> Inference:
    """The quicker way to answer with this network on a CPU: numpy for an mlp, else torch."""
    if kind(network, observation) == "cnn":
        scaled = observation.dtype == np.uint8
        return TorchInference(module, prefix, network.precision, scaled)
    if network.precision != "float32":
        raise Refusal(
            f'network.precision = "{network.precision}" is for convolutions, and this network has '
            f'none, so it would do nothing. Set network.precision = "float32".'
        )
    linear = [name for name, m in module.named_modules() if isinstance(m, nn.Linear)]
    return NumpyMLP(network.activation, [f"{prefix}.{name}" for name in linear])


def parameters(modules: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """Those of named modules, by name. A layer that two modules share is there once, by the name
    that the first one gives it."""
    found: dict[str, nn.Parameter] = {}
    for prefix, module in modules.items():
        for name, parameter in module.named_parameters():
            if all(parameter is not known for known in found.values()):
                found[f"{prefix}.{name}"] = parameter
    return found


def layout(modules: Mapping[str, nn.Module]) -> Layout:
    """The leaves of their parameters."""
    return {name: leaf(tuple(p.shape), np.float32) for name, p in parameters(modules).items()}


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
        self.pictures = kind(network, observation) == "cnn"
        if self.pictures:
            body = Features(network, observation, whole=False)
            self.body: nn.Module = body
            widths = [body.width, body.following, outputs]
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
        x = self.body(x) if self.pictures else self._activation(self.body(x))
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
