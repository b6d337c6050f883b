"""Replay over whole episodes, which lie where actors wrote them and cross rollouts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from tianji import frames
from tianji.algorithm import Lanes
from tianji.errors import Failure
from tianji.role import State
from tianji.types import EPISODE, GAP, HEAD, SOURCE, VERSION, Array, Leaves, Rollout

NONE, LOST = -1, -2
"""instead of an open episode's first row: there is none, or its beginning is not held any more"""
SELECTION = ("lane", "env", "row", "length")
"""leaves of a selection"""
ENV, FIRST, LENGTH, USED = range(4)
"""columns of the index: the env, the first row, how many rows, and 1 once it was consumed"""


class Episodes:
    """Uniform replay over the complete episodes of the newest rollouts.

    A lane is a ring of rows; an episode is a window of one env's rows in it. It begins with the
    first valid row after another one's end. It ends with a terminated row, before a row that is not
    valid, or where a rollout does not continue the one before it (a value follows the last two).
    Rows are numbered from a lane's beginning, and never anew.
    """

    any_order = False

    def __init__(self, lanes: Lanes, batch: int, slots: int) -> None:
        self._lanes = lanes
        self._batch = batch
        self._slots = slots
        """rollouts held per lane"""
        self._total, self._T, self._B = lanes.memory[0]["reward"].shape[:3]
        count = len(lanes.memory)
        self._added = [0] * count
        """rollouts that have ever come"""
        self._held = [0] * count
        self._open = [np.full(self._B, NONE, np.int64) for _ in range(count)]
        """where the episode that each env is in began"""
        self._index = [np.empty((0, 4), np.int64) for _ in range(count)]
        """the complete episodes that are held"""
        self._retired: list[tuple[int, int]] = []

    @property
    def share(self) -> float:
        return float(self._batch / max(1, self.episodes))

    @property
    def episodes(self) -> int:
        """Complete ones that are held."""
        return sum(len(index) for index in self._index)

    def add(self, lane: int, slot: int) -> None:
        if slot != self._added[lane] % self._total:
            raise ValueError(f"slot {slot} of lane {lane} is out of order")
        self._read(lane, slot)
        self._added[lane] += 1
        self._held[lane] += 1
        if self._held[lane] > self._slots:
            self._retire(lane)

    def choose(self, rng: np.random.Generator, out: Leaves) -> float:
        """Each episode at most once, unless there are fewer than a batch."""
        counts = [len(index) for index in self._index]
        if not (total := sum(counts)):
            raise Failure(
                "no episode is complete, so there is nothing to learn from: episodes are cut off "
                "before they end. Look for the faults of the env."
            )
        drawn = rng.choice(total, len(out["lane"]), replace=total < len(out["lane"]))
        ends = np.cumsum(counts)
        lane = np.searchsorted(ends, drawn, side="right")
        fresh = 0
        for i, index in enumerate(self._index):
            (mine,) = np.nonzero(lane == i)
            rows = drawn[mine] - (ends[i] - counts[i])
            fresh += int(np.count_nonzero(index[np.unique(rows), USED] == 0))
            index[rows, USED] = 1
            out["lane"][mine], out["env"][mine] = i, index[rows, ENV]
            out["row"][mine], out["length"][mine] = index[rows, FIRST], index[rows, LENGTH]
        return fresh / len(drawn)

    def retired(self) -> Iterable[tuple[int, int]]:
        retired, self._retired = self._retired, []
        return retired

    def state(self) -> State:
        return {
            "added": list(self._added),
            "held": list(self._held),
            "retired": [list(x) for x in self._retired],
            "open": {str(i): began.copy() for i, began in enumerate(self._open)},
            "index": {str(i): index.copy() for i, index in enumerate(self._index)},
        }

    def load_state(self, state: State) -> None:
        self._added, self._held = list(state["added"]), list(state["held"])
        self._retired = [(lane, slot) for lane, slot in state["retired"]]
        for i, began in enumerate(self._open):
            began[:] = state["open"][str(i)]
        self._index = [np.array(state["index"][str(i)]) for i in range(len(self._index))]

    def _read(self, lane: int, slot: int) -> None:
        """Find the ends of episodes in a rollout that has come, and where others begin."""
        memory, began = self._lanes.memory[lane], self._open[lane]
        valid, terminated = memory["valid"][slot], memory["terminated"][slot]
        row = self._added[lane] * self._T
        found = []
        if memory["head"][slot, GAP]:
            found.append(_ended(began, began != NONE, row))
        for t in range(self._T):
            found.append(_ended(began, (began != NONE) & ~valid[t], row + t))
            began[(began == NONE) & valid[t]] = row + t
            found.append(_ended(began, valid[t] & terminated[t], row + t + 1))
        self._index[lane] = np.concatenate([self._index[lane], *found])

    def _retire(self, lane: int) -> None:
        """Give the oldest rollout up, and with it the episodes that reach into it."""
        oldest = self._added[lane] - self._held[lane]
        self._retired.append((lane, oldest % self._total))
        self._held[lane] -= 1
        kept = (oldest + 1) * self._T
        index, began = self._index[lane], self._open[lane]
        self._index[lane] = index[index[:, FIRST] >= kept]
        began[(began >= 0) & (began < kept)] = LOST


def _ended(began: Array, which: Array, end: int) -> Array:
    """Episodes of these envs end before row `end`: their places in the index; the open ones that
    have lost their beginning have none."""
    (envs,) = np.nonzero(which & (began >= 0))
    first = began[envs]
    began[which] = NONE
    return np.stack([envs, first, end - first, np.zeros_like(envs)], axis=1)


class PaddedEpisodes:
    """Whole episodes.

    A part is one `Rollout` [L, N] of N episodes, padded to the longest of them by rows that are not
    valid: they repeat the last observation and have reward 0. Episodes begin with a policy's
    initial state, so there is nothing in `once`.
    """

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes

    def parts(self, selection: Leaves) -> Iterator[Rollout]:
        lane, env, first, length = (selection[k] for k in ("lane", "env", "row", "length"))
        N, L = len(lane), int(length.max())
        total, T = self._lanes.memory[0]["reward"].shape[:2]
        time = np.arange(L + 1)[:, None]
        last = np.minimum(time, length - 1)
        slot, row = np.divmod(first + last, T)
        slot %= total
        after = row + (time > last)  # an episode's last observation follows its last row
        leaves: Leaves = {}
        for name, array in self._lanes.memory[0].items():
            if name not in ("head", "episodes") and not name.startswith("once."):
                rows = L + name.startswith("observation.")
                leaves[name] = np.empty((rows, N, *array.shape[3:]), array.dtype)
        if (K := self._lanes.frames) > 1:
            obs = leaves["observation.obs"]
            leaves["observation.obs"] = np.empty((L + 1, N, K, *obs.shape[2:]), obs.dtype)
        versions = np.empty(N, np.int64)
        for i, memory in enumerate(self._lanes.memory):
            (mine,) = np.nonzero(lane == i)
            if not len(mine):
                continue
            seen = slot[:, mine], after[:, mine], np.broadcast_to(env[mine], (L + 1, len(mine)))
            done = slot[:-1, mine], row[:-1, mine], env[mine]
            for name, array in leaves.items():
                if name == "observation.obs" and K > 1:
                    array[:, mine] = _stacks(memory, seen)
                else:
                    at = seen if name.startswith("observation.") else done
                    array[:, mine] = memory[name][at]
            versions[mine] = memory["head"][slot[0, mine], VERSION]
        padding = time[:-1] >= length
        for name in ("reward", "terminated", "valid"):
            leaves[name][padding] = 0
        head = np.zeros(HEAD, np.int64)
        head[SOURCE], head[GAP] = -1, 1
        part = Rollout.over(leaves | {"head": head, "episodes": np.empty(0, EPISODE)})
        part.versions = versions
        yield part


def _stacks(memory: Mapping[str, Array], at: tuple[Array, Array, Array]) -> Array:
    """The stacks of pictures at places [L, N] of a lane's observations."""
    flat = at[0].ravel(), at[1].ravel(), at[2].ravel()
    newest, older = memory["observation.obs"], memory["once.frames"]
    stacks = np.empty((at[0].size, older.shape[2] + 1, *newest.shape[3:]), newest.dtype)
    frames.gather([memory], [(0, slice(0, len(stacks)))], flat, stacks)
    return stacks.reshape(*at[0].shape, *stacks.shape[1:])
