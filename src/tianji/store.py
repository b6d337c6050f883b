"""What updates consume, out of the rollouts where they lie: on the buffer a chooser names it, on
the learner a gatherer makes parts of it."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from tianji import frames, returns
from tianji.algorithm import Chooser, Gatherer, Lanes, Spec
from tianji.errors import Failure, Refusal
from tianji.frames import Spans
from tianji.role import State
from tianji.types import (
    EPISODE,
    GAP,
    HEAD,
    SOURCE,
    VERSION,
    VERSIONS,
    Array,
    Layout,
    Leaves,
    Rollout,
    leaf,
)

MOST_DRAWS = 10_000
"""times that replay draws again where it hit steps that only reset an env"""


class Served(NamedTuple):
    """How what updates consume is served."""

    selection: Layout
    """leaves of one choice"""
    pieces: int = 1
    """choices for one update"""


def numbers(names: Iterable[str], length: int) -> Layout:
    """Leaves of a selection."""
    return {name: leaf((length,), np.int64) for name in names}


def served_once(spec: Spec, rollouts: int) -> Served:
    """For updates of so many rollouts, each consumed once: as a batch, streamed or from a window,
    whichever the run asks for. An algorithm that uses it says so by `Traits.once`."""
    if spec.window > 1:
        columns = rollouts * spec.envs
        if columns % spec.window:
            fits = [k for k in range(1, columns + 1) if columns % k == 0]
            near = min(fits, key=lambda k: (abs(k - spec.window), k))
            raise Refusal(
                f"reuse.window = {spec.window} does not divide the {columns} envs of a batch, so "
                f"that 1 / {spec.window} of it could not be new. Set it to {near}, or "
                f"scale.envs_per_actor to a multiple of {spec.window}."
            )
        return Served(numbers(("lane", "slot", "env"), columns))
    pieces = rollouts // spec.learners if spec.start == "stream" else 1
    return Served(numbers(("lane", "slot"), rollouts // pieces), pieces)


def chooser_once(spec: Spec, lanes: Lanes) -> Chooser:
    """Of what `served_once` serves."""
    return Window(lanes, spec.window) if spec.window > 1 else Fresh()


def gatherer_once(spec: Spec, lanes: Lanes) -> Gatherer:
    """Of what `served_once` serves."""
    return Columns(lanes) if spec.window > 1 else Rollouts(lanes)


class Fresh:
    """Each rollout is consumed once, in the order of arrival."""

    share = 1.0
    any_order = True

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, int]] = deque()
        self._retired: list[tuple[int, int]] = []

    def add(self, lane: int, slot: int) -> None:
        self._waiting.append((lane, slot))

    def choose(self, rng: np.random.Generator, out: Leaves) -> float:
        for i in range(len(out["lane"])):
            lane, slot = self._waiting.popleft()
            out["lane"][i], out["slot"][i] = lane, slot
            self._retired.append((lane, slot))
        return 1.0

    def retired(self) -> Iterable[tuple[int, int]]:
        retired, self._retired = self._retired, []
        return retired

    def state(self) -> State:
        return {
            "waiting": [list(x) for x in self._waiting],
            "retired": [list(x) for x in self._retired],
        }

    def load_state(self, state: State) -> None:
        self._waiting = deque((lane, slot) for lane, slot in state["waiting"])
        self._retired = [(lane, slot) for lane, slot in state["retired"]]


class Rollouts:
    """Whole rollouts, in place."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes

    def parts(self, selection: Leaves) -> Iterator[Rollout]:
        for lane, slot in zip(selection["lane"].tolist(), selection["slot"].tolist(), strict=True):
            memory = self._lanes.memory[lane]
            yield _whole(Rollout.over({name: array[slot] for name, array in memory.items()}))


class Window:
    """A batch from the last K batches, 1 / K of it from each: the paper's New (K = 1), Lag2, Lag4
    and Lag8. What is drawn is the whole time of single envs; the newest batch is all new."""

    any_order = True

    def __init__(self, lanes: Lanes, batches: int) -> None:
        self._batches = batches
        self._B = lanes.memory[0]["reward"].shape[2]
        self._waiting: deque[tuple[int, int]] = deque()
        self._held: deque[list[tuple[int, int]]] = deque()
        self._used = [np.zeros((len(m["head"]), self._B), np.bool_) for m in lanes.memory]
        """which envs' time of each slot was consumed before"""
        self._retired: list[tuple[int, int]] = []

    @property
    def share(self) -> float:
        return 1.0 / max(1, len(self._held))

    def add(self, lane: int, slot: int) -> None:
        self._used[lane][slot] = False
        self._waiting.append((lane, slot))

    def choose(self, rng: np.random.Generator, out: Leaves) -> float:
        if len(self._held) == self._batches:
            self._retired += self._held.popleft()
        columns = len(out["lane"])
        self._held.append([self._waiting.popleft() for _ in range(columns // self._B)])
        m = len(self._held)
        cuts = [columns * i // m for i in range(m + 1)]
        fresh = 0
        for batch, begin, end in zip(self._held, cuts, cuts[1:], strict=False):
            drawn = rng.permutation(columns)[: end - begin]
            place, env = np.divmod(drawn, self._B)
            lane, slot = np.array(batch).T[:, place]
            out["lane"][begin:end], out["slot"][begin:end] = lane, slot
            out["env"][begin:end] = env
            for i, used in enumerate(self._used):
                mine = lane == i
                fresh += int(np.count_nonzero(~used[slot[mine], env[mine]]))
                used[slot[mine], env[mine]] = True
        return float(fresh / columns)

    def retired(self) -> Iterable[tuple[int, int]]:
        retired, self._retired = self._retired, []
        return retired

    def state(self) -> State:
        return {
            "waiting": [list(x) for x in self._waiting],
            "held": [[list(x) for x in batch] for batch in self._held],
            "used": {str(i): used.copy() for i, used in enumerate(self._used)},
            "retired": [list(x) for x in self._retired],
        }

    def load_state(self, state: State) -> None:
        self._waiting = deque((lane, slot) for lane, slot in state["waiting"])
        self._held = deque([(lane, slot) for lane, slot in batch] for batch in state["held"])
        for i, used in enumerate(self._used):
            used[:] = state["used"][str(i)]
        self._retired = [(lane, slot) for lane, slot in state["retired"]]


class Columns:
    """The whole time of single envs, as many to a part as a rollout has."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes

    def parts(self, selection: Leaves) -> Iterator[Rollout]:
        whole = self._lanes.memory[0]["reward"].shape[2]
        for begin in range(0, len(selection["lane"]), whole):
            lane, slot, env = (selection[k][begin : begin + whole] for k in ("lane", "slot", "env"))
            B = len(lane)  # of a learner's share the last part may be smaller
            leaves: Leaves = {}
            for name, array in self._lanes.memory[0].items():
                if name.startswith("once."):
                    leaves[name] = np.empty((B, *array.shape[2:]), array.dtype)
                elif name not in ("head", "episodes"):
                    leaves[name] = np.empty((array.shape[1], B, *array.shape[3:]), array.dtype)
            versions = np.empty(B, np.int64)
            for i, memory in enumerate(self._lanes.memory):
                (mine,) = np.nonzero(lane == i)
                for name, array in leaves.items():
                    if name.startswith("once."):
                        array[mine] = memory[name][slot[mine], env[mine]]
                    else:
                        array[:, mine] = memory[name][slot[mine], :, env[mine]].swapaxes(0, 1)
                versions[mine] = memory["head"][slot[mine], VERSION]
            head = np.zeros(HEAD, np.int64)
            head[SOURCE], head[GAP] = -1, 1
            part = Rollout.over(leaves | {"head": head, "episodes": np.empty(0, EPISODE)})
            part.versions = versions
            yield _whole(part)


class Replay:
    """Uniform replay over the valid steps of the newest rollouts that have a whole n-step window.

    The lanes themselves are the memory: each is a ring of rows, and a step is row * B + env.
    """

    any_order = False

    def __init__(self, lanes: Lanes, batch: int, slots: int, n: int) -> None:
        self._batch = batch
        self._slots = slots
        """rollouts held per lane"""
        self._total, self._T, self._B = lanes.memory[0]["valid"].shape
        self._n = n
        self._first = [0] * len(lanes.memory)
        self._held = [0] * len(lanes.memory)
        self._retired: list[tuple[int, int]] = []
        self._valid = [memory["valid"].reshape(-1) for memory in lanes.memory]
        self._used = [np.zeros(valid.shape, np.bool_) for valid in self._valid]
        """which steps were consumed before"""

    @property
    def share(self) -> float:
        return float(self._batch / max(1, sum(self._held) * self._T * self._B))

    def add(self, lane: int, slot: int) -> None:
        if slot != (self._first[lane] + self._held[lane]) % self._total:
            raise ValueError(f"slot {slot} of lane {lane} is out of order")
        rows = self._T * self._B
        self._used[lane][slot * rows : (slot + 1) * rows] = False
        self._held[lane] += 1
        if self._held[lane] > self._slots:
            self._retired.append((lane, self._first[lane]))
            self._first[lane] = (self._first[lane] + 1) % self._total
            self._held[lane] -= 1

    def choose(self, rng: np.random.Generator, out: Leaves) -> float:
        lanes, steps = out["lane"], out["step"]
        # The newest n - 1 rows of a lane have no complete n-step window yet.
        rows = np.array([max(0, held * self._T - (self._n - 1)) for held in self._held])
        ends = np.cumsum(rows * self._B)
        want = np.arange(len(steps))
        for _ in range(MOST_DRAWS):
            if not len(want):
                if len(rows) > 1:  # the learner gathers from one lane after the other
                    order = np.argsort(lanes, kind="stable")
                    lanes[:], steps[:] = lanes[order], steps[order]
                return self._use(lanes, steps)
            drawn = rng.integers(0, ends[-1], len(want))
            lane = np.searchsorted(ends, drawn, side="right") if len(rows) > 1 else 0
            first = np.asarray(self._first)[lane] * (self._T * self._B)
            step = drawn - (ends - rows * self._B)[lane]
            step = (step + first) % (self._total * self._T * self._B)
            lanes[want], steps[want] = lane, step
            want = want[~self._are_valid(lane, step)]
        raise Failure(
            f"replay found no valid step in {MOST_DRAWS} draws: the env ends its episodes at once, "
            f"so that nearly all steps only reset it."
        )

    def retired(self) -> Iterable[tuple[int, int]]:
        retired, self._retired = self._retired, []
        return retired

    def state(self) -> State:
        retired = [list(x) for x in self._retired]
        used = {str(i): used.copy() for i, used in enumerate(self._used)}
        first, held = list(self._first), list(self._held)
        return {"first": first, "held": held, "retired": retired, "used": used}

    def load_state(self, state: State) -> None:
        self._first, self._held = list(state["first"]), list(state["held"])
        self._retired = [(lane, slot) for lane, slot in state["retired"]]
        for i, used in enumerate(self._used):
            used[:] = state["used"][str(i)]

    def _use(self, lanes: Array, steps: Array) -> float:
        """Note that these are consumed; the share of them that never was before."""
        if len(self._used) == 1:
            used = self._used[0]
            fresh = len(steps) - int(np.count_nonzero(used[steps]))
            used[steps] = True
            return fresh / len(steps)
        fresh = 0
        for i, used in enumerate(self._used):
            mine = steps[lanes == i]
            fresh += len(mine) - int(np.count_nonzero(used[mine]))
            used[mine] = True
        return fresh / len(steps)

    def _are_valid(self, lane: Array | int, step: Array) -> Array:
        if len(self._valid) == 1:
            return self._valid[0][step]
        valid = np.empty(len(step), np.bool_)
        for i, of_lane in enumerate(self._valid):
            valid[lane == i] = of_lane[step[lane == i]]
        return valid


class NStep:
    """The n-step windows of steps in lanes that are rings of rows."""

    def __init__(self, lanes: Lanes, gamma: float, n: int) -> None:
        self.flat = [_flat(memory) for memory in lanes.memory]
        self._total, self._T, self._B = lanes.memory[0]["valid"].shape
        self._gamma, self._n = gamma, n

    def windows(self, spans: Spans, step: Array) -> tuple[Array, Array, Array]:
        """Of the n-step windows that begin at `step`: the discounted sum of rewards, the factor of
        the value that follows, and their last steps."""
        T, B = self._T, self._B
        if self._n == 1:
            gamma = np.float32(self._gamma)
            ended = self.fetch(spans, "terminated", step)
            return self.fetch(spans, "reward", step), np.where(ended, 0 * gamma, gamma), step
        row, env = np.divmod(step, B)
        window = (row + np.arange(self._n)[:, None]) % (self._total * T)
        steps = window * B + env
        valid = self.fetch(spans, "valid", steps)
        # A rollout that does not continue the one before it ends every window at its edge.
        gap = self.fetch(spans, "head", window // T * HEAD + GAP).astype(np.bool_)
        valid[1:] &= ~(gap & (window % T == 0))[1:]
        reward, terminated = (self.fetch(spans, name, steps) for name in ("reward", "terminated"))
        reward, discount, last = returns.n_step(reward, terminated, valid, self._gamma, self._n)
        return reward, discount, steps[last, np.arange(len(step))]

    def fetch(self, spans: Spans, name: str, at: Array) -> Array:
        """What lies at places [N] or [n, N] of a leaf, each in its own lane."""
        some = self.flat[0][name]
        out = np.empty((*at.shape, *some.shape[1:]), some.dtype)
        for lane, where in spans:
            mine = where if at.ndim == 1 else (slice(None), where)
            out[mine] = self.flat[lane][name].take(at[mine], axis=0)
        return out


class Transitions:
    """Steps with their n-step returns.

    A part is one `Rollout` of a single row: observation [2, N] (where the step began, and where its
    n-step return ends), reward [1, N] the discounted sum, and extras "discount" [1, N], the factor
    of the value that follows (0 after termination).
    """

    def __init__(self, lanes: Lanes, gamma: float, n: int) -> None:
        self._lanes = lanes
        self._steps = NStep(lanes, gamma, n)
        self._T, self._B = lanes.memory[0]["valid"].shape[1:]
        self._n = n
        self._part: Rollout | None = None
        self._pictures: Array | None = None
        """where stacks of two successive rows are handed out: all of their pictures, each once"""

    def parts(self, selection: Leaves) -> Iterator[Rollout]:
        """Of a selection whose lanes ascend."""
        if self._part is None:
            self._part = self._room(len(selection["step"]))
        bounds = np.searchsorted(selection["lane"], np.arange(len(self._steps.flat) + 1)).tolist()
        spans = [
            (lane, slice(begin, end))
            for lane, (begin, end) in enumerate(itertools.pairwise(bounds))
            if begin < end
        ]
        self._gather(spans, selection["step"], self._part)
        yield self._part

    def _room(self, N: int) -> Rollout:
        flat = self._steps.flat[0]

        def empty(rows: int, array: Array) -> Array:
            return np.empty((rows, N, *array.shape[1:]), array.dtype)

        observation = {k[12:]: empty(2, a) for k, a in flat.items() if k.startswith("observation.")}
        if (K := self._lanes.frames) > 1:
            obs = flat["observation.obs"]
            observation["obs"] = np.empty((2, N, K, *obs.shape[1:]), obs.dtype)
        if K > 1 and self._n == 1:
            self._pictures = np.empty((N, K + 1, *obs.shape[1:]), obs.dtype)
            # [N, 2, ..., K]; "writeable", as torch warns of what is not.
            windows = sliding_window_view(self._pictures, K, axis=1, writeable=True)
            observation["obs"] = np.moveaxis(windows, (1, -1), (0, 2))
        return Rollout(
            observation=observation,
            action=empty(1, flat["action"]),
            reward=empty(1, flat["reward"]),
            terminated=np.zeros((1, N), np.bool_),
            valid=np.ones((1, N), np.bool_),
            extras={"discount": np.empty((1, N), np.float32)},
            once={},
            head=np.zeros(HEAD, np.int64),
            episode_table=np.empty(0, EPISODE),
            versions=np.zeros(N, np.int64),
        )

    def _gather(self, spans: Spans, step: Array, part: Rollout) -> None:
        """Copy the windows that begin at `step` (row * B + env) of these lanes into the part."""
        rows = self._T * self._B
        reward, discount, last = self._steps.windows(spans, step)
        # Observations have T + 1 rows a slot.
        ends = step + step // rows * self._B, last + (last // rows + 1) * self._B
        for name, array in part.observation.items():
            if name == "obs" and self._pictures is not None:
                self._stacks(spans, ends[1], self._pictures)
            elif name == "obs" and self._lanes.frames > 1:
                for at, out in zip(ends, array, strict=True):
                    self._stacks(spans, at, out)
            else:
                for at, out in zip(ends, array, strict=True):
                    self._copy(spans, f"observation.{name}", at, out)
        part.action[0] = self._steps.fetch(spans, "action", step)
        part.reward[0] = reward
        part.extras["discount"][0] = discount
        part.terminated[0] = discount == 0.0
        part.versions[:] = self._versions(spans, step)

    def _versions(self, spans: Spans, step: Array) -> Array:
        """Policy versions that acted: of each step where they are recorded, else of its rollout."""
        own = f"extras.{VERSIONS}"
        if own in self._lanes.memory[0]:
            return self._steps.fetch(spans, own, step)
        rows = self._T * self._B
        return self._steps.fetch(spans, "head", step // rows * HEAD + VERSION)

    def _copy(self, spans: Spans, name: str, at: Array, out: Array) -> None:
        """Write what lies at places [N] of a leaf into `out`; they were fetched from before."""
        for lane, where in spans:
            # "clip": what is out of bounds is not looked for, and `out` is written at once.
            self._steps.flat[lane][name].take(at[where], axis=0, out=out[where], mode="clip")

    def _stacks(self, spans: Spans, at: Array, out: Array) -> None:
        """Write the stacks of pictures at these places of lanes' observations."""
        row, env = np.divmod(at, self._B)
        slot, row = np.divmod(row, self._T + 1)
        frames.gather(self._lanes.memory, spans, (slot, row, env), out)


def _whole(part: Rollout) -> Rollout:
    """A rollout whose memory holds each picture of a stack once, with all stacks."""
    if (older := part.once.pop("frames", None)) is not None:
        part.observation["obs"] = frames.stacked(part.observation["obs"], older, part.valid)
    return part


def _flat(memory: object) -> Leaves:
    """Leaves [slots, T, B, ...] as [slots * T * B, ...], without a copy, and "head" as one row."""
    assert isinstance(memory, dict)
    flat: Leaves = {
        name: array.reshape(-1, *array.shape[3:])
        for name, array in memory.items()
        if name not in ("head", "episodes") and not name.startswith("once.")
    }
    return flat | {"head": memory["head"].reshape(-1)}
