"""What becomes of a gradient between its average over learners and the optimizer's step."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tianji.errors import Refusal, nearest
from tianji.role import State
from tianji.types import Array


class Outcome(NamedTuple):
    """What becomes of a step."""

    factor: float = 1.0
    """of the step size; 0: the step is left out"""
    damped: bool = False
    """is it smaller than it would have been?"""


AS_IT_IS, SKIP, DAMPED = Outcome(), Outcome(0.0), Outcome(damped=True)


class Transform(Protocol):
    """Looks at every gradient of one optimizer, in their order."""

    def __call__(self, gradient: Tensor, staleness: float) -> Outcome:
        """Change the gradient [n] in place; `staleness` is the mean of the batch, in versions."""

    def state(self) -> State: ...

    def load_state(self, state: State) -> None: ...


class Alignment:
    """Gradient alignment control: GAC (Xu et al. 2026).

    Gradients of stale batches go on pushing where the last ones pushed: c, the cosine between a
    gradient and the one before it, stays high, and steps overshoot. Where c is between LOW and
    HIGH, the part along the last gradient is scaled by (HIGH - c) / (HIGH - LOW), and FLOOR at
    least; from HIGH on the step is left out. After MOST_SKIPS in a row one is made with FLOOR:
    parameters that do not move have gradients that agree for ever.
    """

    LOW, HIGH, FLOOR, MOST_SKIPS = 0.3, 0.9, 0.1, 1

    def __init__(self) -> None:
        self._before: Tensor | None = None
        """the last gradient, as it came"""
        self._skips = 0
        """in a row"""

    def __call__(self, gradient: Tensor, staleness: float) -> Outcome:
        before, self._before = self._before, gradient.clone()
        if before is None:
            return AS_IT_IS
        before = before.to(gradient.device)
        along, length, last = torch.stack(
            [gradient @ before, gradient @ gradient, before @ before]
        ).tolist()
        c = along / max((length * last) ** 0.5, 1e-30)
        if c >= self.HIGH and self._skips < self.MOST_SKIPS:
            self._skips += 1
            return SKIP
        self._skips = 0
        if not c > self.LOW:  # nor where it is not a number: that is found out elsewhere
            return AS_IT_IS
        kept = max(self.FLOOR, (self.HIGH - c) / (self.HIGH - self.LOW))
        gradient.add_(before, alpha=(kept - 1.0) * along / last)
        return DAMPED

    def state(self) -> State:
        before = None if self._before is None else self._before.cpu().numpy().copy()
        return {"before": before, "skips": self._skips}

    def load_state(self, state: State) -> None:
        before: Array | None = state["before"]
        self._before = None if before is None else torch.from_numpy(before.copy())
        self._skips = state["skips"]


class Age:
    """Smaller steps for older batches: by (1 + s)^-POWER, where s is the staleness (Zhang et al.
    2016; the power is that of Xie et al. 2019).

    The factor is of the step size: Adam, which divides gradients by their usual size, would undo it
    on a gradient as soon as all batches are equally old.
    """

    POWER = 0.5

    def __call__(self, gradient: Tensor, staleness: float) -> Outcome:
        return Outcome((1.0 + staleness) ** -self.POWER, damped=staleness > 0)

    def state(self) -> State:
        return {}

    def load_state(self, state: State) -> None:
        pass


TRANSFORMS: dict[str, Callable[[], Transform]] = {"gac": Alignment, "age": Age}
"""by the word of relax.gradient"""


def transform(word: str) -> Transform | None:
    """What relax.gradient asks for, for one optimizer; None: nothing."""
    if word == "none":
        return None
    if word not in TRANSFORMS:
        raise Refusal(
            f'relax.gradient = "{word}" is not known, so gradients would be left as they are.'
            f"{nearest(word, TRANSFORMS)} It is one of none, {', '.join(TRANSFORMS)}."
        )
    return TRANSFORMS[word]()
