"""The optimizer seam: backward, average, transform, clip, step, on parameters in one buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from tianji.algorithm import Gradients
from tianji.errors import Failure, Refusal
from tianji.gradients import transform
from tianji.networks import parameters
from tianji.role import State
from tianji.team import Alone, Shared, Team
from tianji.types import Array, Leaves

ALONE = Alone()


class Flat:
    """The parameters of named modules, moved into one buffer that the modules go on using."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.names = parameters(modules)
        device = next(iter(self.names.values())).device
        self.data = torch.empty(sum(p.numel() for p in self.names.values()), device=device)
        for parameter, view in self._views(self.data):
            view.copy_(parameter.detach())
            parameter.data = view

    def gradient(self) -> Tensor:
        """One buffer for all gradients, into which backward will add, and two numbers more."""
        gradient = torch.zeros(len(self.data) + 2, device=self.data.device)
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
    zeroing, averaging, clipping and stepping one operation each, whatever the number of layers."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        max_norm: float = 0.0,
        eps: float = 1e-8,
        betas: tuple[float, float] = (0.9, 0.999),
        team: Team = ALONE,
        shared: Shared | None = None,
        gradients: Gradients | None = None,
    ) -> None:
        """Gradients are averaged over the `team`, then become what `gradients` says; `shared`
        parameters are stepped by all."""
        self.flat = Flat(modules)
        self._sum = self.flat.gradient()
        """the gradients and, when learners add them up, the rows that they are a mean of, and the
        sum of these rows' staleness"""
        self._gradient = self._sum[:-2]
        self._gradients = gradients
        self._transform = None if gradients is None else transform(gradients.kind)
        self._max_norm = max_norm
        self._eps = eps
        self._betas = betas
        self._team = team
        self._shared = shared
        self._parameters = self.flat.data
        self._m = torch.zeros_like(self.flat.data)
        self._v = torch.zeros_like(self.flat.data)
        self._steps = torch.zeros((), device=self.flat.data.device)
        self._laid_out = torch.ones(())
        if shared is not None:
            if team.size > 1:
                raise Refusal(
                    f"parameters that are stepped without locks would be stepped {team.size} times "
                    f"by the learners of one group. Set scale.learners = 1."
                )
            self._lay_out(shared)

    def step(self, loss: Tensor | None, learning_rate: float, rows: int) -> Tensor:
        """Backward, average, transform, clip, step; the norm of the gradient before clipping.

        The loss is a mean over `rows`; the gradient becomes the mean over all learners' rows. With
        0 rows there is no loss, but all learners must make the same number of steps.
        """
        self._gradient.zero_()
        if rows:
            assert loss is not None
            loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            if not self._average(rows):
                return torch.zeros((), device=self.flat.data.device)
            factor = self._transformed()
            norm: Tensor = torch.linalg.vector_norm(self._gradient)
            if self._max_norm > 0:
                self._gradient.mul_((self._max_norm / (norm + 1e-6)).clamp_(max=1.0))
            if factor > 0:
                self._adam(factor * learning_rate)
        self.refresh()
        return norm

    @property
    def transforms(self) -> bool:
        """Does it heed what is asked of gradients?"""
        return self._transform is not None

    @property
    def repeats(self) -> bool:
        """Is a step the same kernels every time, whatever the gradient and whoever else steps?"""
        return self._team.size == 1 and self._transform is None and self._shared is None

    def refresh(self) -> None:
        """Where parameters are shared: look at what the others have made of them meanwhile."""
        if self._shared is not None and self._laid_out:
            self.flat.data.copy_(self._parameters)

    def finite(self) -> bool:
        """Are all parameters finite?"""
        return bool(torch.isfinite(self.flat.data.sum()))

    def state(self) -> State:
        self.refresh()
        moments = {"m": self._m, "v": self._v, "steps": self._steps}
        return {
            "parameters": self.flat.copies(),
            "moments": {name: t.cpu().numpy().copy() for name, t in moments.items()},
        } | ({} if self._transform is None else {"transform": self._transform.state()})

    def load_state(self, state: State) -> None:
        """Go on from a state; shared parameters are loaded by their first learner alone."""
        self.flat.load(state["parameters"])
        if self._transform is not None:
            self._transform.load_state(state["transform"])
        if self._shared is not None:
            if not self._shared.first:
                return
            self._parameters.copy_(self.flat.data)
        for name, tensor in (("m", self._m), ("v", self._v), ("steps", self._steps)):
            tensor.copy_(torch.from_numpy(np.asarray(state["moments"][name])))

    def _average(self, rows: int) -> bool:
        """Make the gradient the mean over all learners' rows; False where there are none."""
        if self._team.size == 1:
            return rows > 0
        self._gradient.mul_(rows)
        self._sum[-2] = rows
        if self._gradients is not None:
            self._sum[-1] = rows * self._gradients.staleness
        total = self._team.sum(self._sum)[-2]
        if not total:
            return False
        self._gradient.div_(total)
        return True

    def _transformed(self) -> float:
        """Let the gradient become what is asked for; the factor of the step size."""
        if self._transform is None or self._gradients is None:
            return 1.0
        alone = self._team.size == 1
        staleness = self._gradients.staleness if alone else float(self._sum[-1] / self._sum[-2])
        factor, damped = self._transform(self._gradient, staleness)
        self._gradients.steps += 1
        self._gradients.skipped += factor == 0
        self._gradients.damped += damped
        return factor

    def _adam(self, learning_rate: float) -> None:
        if not self._laid_out:
            raise Failure(
                "the shared parameters are not laid out yet, so that this step would be lost. "
                "Make the first learner, and load its state, before any other begins."
            )
        self._steps.add_(1)
        torch._fused_adam_(
            [self._parameters],
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

    def _lay_out(self, shared: Shared) -> None:
        """Let parameters, moments and the count of steps be places in the shared buffer."""
        n = len(self.flat.data)
        if self.flat.data.device.type != "cpu":
            raise Refusal(
                "parameters that several processes step without locks must lie in shared memory, "
                'where a GPU cannot step them. Set scale.device = "cpu".'
            )
        if shared.flat.dtype != np.float32 or shared.flat.size < Shared.size(n):
            raise ValueError(f"{n} parameters need {Shared.size(n)} shared float32 numbers")
        buffer = torch.from_numpy(shared.flat)
        self._laid_out, self._steps = buffer[0], buffer[1]
        self._parameters, self._m, self._v = buffer[2 : 2 + 3 * n].view(3, n)
        if shared.first:
            self._parameters.copy_(self.flat.data)
            self._laid_out.fill_(1.0)


def mean_over(team: Team, values: Tensor, rows: Sequence[int]) -> Tensor:
    """Means over each learner's own rows, [n, k], into means over all learners' rows; those that
    are of no row at all are left out."""
    if team.size == 1 and all(rows):
        return values
    counts = torch.tensor(rows, dtype=values.dtype, device=values.device).unsqueeze(-1)
    sums = torch.where(counts > 0, values * counts, 0.0)
    total = team.sum(torch.cat([sums, counts], -1))
    some = total[total[:, -1] > 0]
    return some[:, :-1] / some[:, -1:]


def spread(team: Team, *columns: Tensor) -> tuple[int, list[tuple[Tensor, Tensor]]]:
    """How many rows all learners have, and each column's mean and deviation over them."""
    rows = len(columns[0])
    if team.size == 1:
        if not rows:
            return 0, [(torch.zeros(()), torch.zeros(()))] * len(columns)
        return rows, [(x.mean(), x.std(correction=0)) for x in columns]
    count = torch.full((), rows, dtype=torch.float64, device=columns[0].device)
    total, *sums = team.sum(torch.stack([count, *(x.double().sum() for x in columns)]))
    means = [x / total.clamp(min=1) for x in sums]
    pairs = zip(columns, means, strict=True)
    second = torch.stack([(x.double() - mean).square().sum() for x, mean in pairs])
    deviations = (team.sum(second) / total.clamp(min=1)).sqrt()
    return int(total), [
        (mean.to(x.dtype), deviation.to(x.dtype))
        for x, mean, deviation in zip(columns, means, deviations, strict=True)
    ]
