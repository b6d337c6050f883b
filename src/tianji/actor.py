"""The actor: steps its envs with its policy, straight into the slot it was granted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tianji.algorithm import Acting, Decision, restart
from tianji.channel import Outbox, Slot, Subscriber
from tianji.env import Env, Halves, Restorable, TimeStep, check_step, first_observation, remake
from tianji.errors import Failure
from tianji.fault import Fault, raised
from tianji.ledger import ALL, Ledger
from tianji.newest import Newest
from tianji.role import Did, State, generator_state, load_generator_state
from tianji.role_names import RoleName
from tianji.trigger import Counts, Trigger
from tianji.types import (
    EPISODES,
    GAP,
    PRODUCED,
    SEQ,
    SOURCE,
    STEPS,
    UPDATE,
    VERSION,
    VERSIONS,
    Array,
    Leaves,
    Rollout,
)

LOAD, INFER, SIMULATE = Did("load"), Did("infer"), Did("simulate")
PUSH, REBUILD = Did("push"), Did("rebuild")
NO_GRANT, NO_VERSION = Did(waits="buffer"), Did(waits="learner")
INACTIVE = Did(waits="turn")
"""it has made all that was granted to it, and is granted no more until it is active again"""
NOTHING = Counts()
FRAMES = "frames"
"""leaf of `Rollout.once`: the pictures of a stack that are older than the first row's own"""


@dataclass
class _Part:
    """The envs that are stepped together: all, or one half while the policy looks at the other."""

    where: slice
    observation: Leaves
    """what the next action is chosen by"""
    recurrent: Leaves
    t: int = 0
    """rows of the rollout that are made"""
    decision: Decision | None = None
    """what is being simulated, or will be"""
    error: Exception | None = field(default=None, repr=False)
    """what its env raised when the simulation began"""


class Actor:
    """Tasks 1 and 2 in one role: choosing actions is a call, not a message."""

    def __init__(
        self,
        index: int,
        env: Env,
        policy: Acting,
        rollouts: Outbox,
        snapshots: Subscriber | None,
        behind: float,
        rng: np.random.Generator,
        seed: int,
        make: Callable[[int], Env],
        send: Trigger | None = None,
        halves: bool = False,
    ) -> None:
        """A grant for update k is begun with version k - `behind` or a newer one; without
        `snapshots`, the policy is elsewhere and has its own. `make` makes the env anew where it
        raised; `send` says when a rollout is pushed before it is full. `halves`: one half of the
        envs simulates while the policy chooses for the other."""
        self.name = RoleName("actor", index)
        self.produced = 0
        """valid steps so far"""
        self.steps = 0
        """steps that each env has made since it was built"""
        self.seed = seed
        """of the env as it is now"""
        self.active = True
        """is it granted rollouts? Only said here, so that its waiting has a name; the buffer
        decides"""
        self.fault: Fault | None = None
        """why the env was made anew; set when `step` returns REBUILD"""
        self.index = index
        self._env = env
        self._make = make
        self._policy = policy
        self._rollouts = rollouts
        self._newest = Newest(snapshots, policy)
        self._follows = snapshots is not None
        """is the policy its own?"""
        self._behind = behind
        self._send = send
        self._rng = rng
        self._frames = env.spec.frames
        self._shapes = {name: leaf.shape for name, leaf in env.spec.observation.items()}
        B = env.num_envs
        cuts = [slice(0, B // 2), slice(B // 2, B)] if halves else [ALL]
        observation = first_observation(env, seed)
        self._parts = [_Part(where, {}, policy.initial(len(range(B)[where]))) for where in cuts]
        self._turn = 0
        """the part that is looked at next"""
        self._look(observation)
        self._ledger = Ledger(B)
        self._seq = 0
        self._gap = True
        self._slot: Slot | None = None
        self._rollout: Rollout | None = None
        self._half = -1
        """rows of a rollout that was half made when the state was taken; -1: none was"""

    @property
    def version(self) -> int:
        """Of the policy that acts; -1 before the first."""
        return self._newest.version

    def step(self) -> Did:
        if self._rollout is None:
            return self._begin()
        part = self._parts[self._turn]
        if part.decision is not None:
            return self._simulate(self._rollout, part)
        if part.t == len(self._rollout.reward):
            return self._push(self._rollout)
        return self._infer(self._rollout, part)

    def follow(self, produced: int, seq: int) -> None:
        """Take the place of an actor that died after so many valid steps and rollouts."""
        self.produced, self._seq = produced, seq

    def state(self) -> State:
        """A rollout that is half made lies in the lane's memory; here is how far it is."""
        state: State = {
            "produced": self.produced,
            "seq": self._seq,
            "gap": self._gap,
            "t": self._parts[0].t if self._rollout is not None else self._half,
            "version": self.version,
            "params": None if self._newest.leases else self._newest.params.buffer.copy(),
            "rng": generator_state(self._rng),
            "ledger": self._ledger.state(),
        }
        if self._restorable is None:
            return state
        (part,) = self._parts
        state |= {"observation": _copies(part.observation), "recurrent": _copies(part.recurrent)}
        state["decision"] = None
        if part.decision is not None:
            action, recurrent, extras, *_ = part.decision
            recurrent, extras = _copies(recurrent), _copies(extras)
            state["decision"] = {"action": action.copy(), "state": recurrent, "extras": extras}
        return state | {"env": self._restorable.state()}

    def load_state(self, state: State) -> None:
        """Go on where the state was taken. Without the env's state, from a fresh reset: a rollout
        that was half made is begun again, and windows do not reach across."""
        self.produced, self._seq = state["produced"], state["seq"]
        load_generator_state(self._rng, state["rng"])
        if not self.exact(state):
            # Not the seed of the run's beginning: its first episodes would be played again.
            self.seed = int(self._rng.integers(2**31))
            self._look(first_observation(self._env, self.seed))
            return
        assert self._restorable is not None
        self._restorable.load_state(state["env"])
        self._gap, self._newest.version = state["gap"], state["version"]
        np.copyto(self._newest.params.buffer, state["params"])
        if self.version >= 0:
            self._policy.load(self._newest.params)
        self._ledger.load_state(state["ledger"])
        (part,) = self._parts
        part.recurrent, part.observation = state["recurrent"], state["observation"]
        self._half = state["t"]
        if state["decision"] is not None:
            part.decision = Decision(**state["decision"])

    def exact(self, state: State) -> bool:
        """Can this actor go on exactly from the state? Not where a server knows its episodes."""
        return "env" in state and self._restorable is not None

    @property
    def _restorable(self) -> Restorable | None:
        """The env, if it can go on exactly where it was: not one whose other half is under way, nor
        one whose episodes a server knows, nor where the policy alone has its params."""
        alone = self._follows and not self._newest.leases and len(self._parts) == 1
        return self._env if alone and isinstance(self._env, Restorable) else None

    def close(self) -> None:
        self._env.close()

    def _begin(self) -> Did:
        """Take the next grant, once the version that it asks for is here."""
        if not (granted := self._rollouts.granted()):
            return NO_GRANT if self.active else INACTIVE
        slot = granted[0]
        if self._half >= 0:
            self._open(slot)
            self._parts[0].t, self._half = self._half, -1
            return LOAD
        if self._newest.take():
            return LOAD
        if self._follows and (self.version < 0 or self.version < slot.update - self._behind):
            return NO_VERSION
        rollout = self._open(slot)
        for part in self._parts:
            part.t = 0
            self._observe(rollout, part)
            if self._frames > 1:
                rollout.once[FRAMES][part.where] = part.observation["obs"][:, :-1]
            self._begin_recurrent(rollout, part, part.recurrent)
        head = rollout.head
        head[VERSION], head[SOURCE], head[SEQ] = self.version, self.index, self._seq
        head[UPDATE], head[EPISODES], head[GAP] = slot.update, 0, self._gap
        self._gap, self._turn = False, 0
        return LOAD

    def _open(self, slot: Slot) -> Rollout:
        self._slot, self._rollout = slot, Rollout.over(slot.arrays)
        return self._rollout

    def _begin_recurrent(self, rollout: Rollout, part: _Part, state: Leaves) -> None:
        for name, array in state.items():
            if name in rollout.once:
                rollout.once[name][part.where] = array

    def _look(self, observation: Leaves) -> None:
        """This is what all envs observe now."""
        for part in self._parts:
            part.observation = {name: array[part.where] for name, array in observation.items()}

    def _observe(self, rollout: Rollout, part: _Part) -> None:
        """Write what a part observes into its row; of a stack, the newest picture."""
        for name, rows in rollout.observation.items():
            array = part.observation[name]
            if array.shape[1:] != self._shapes[name]:
                raise Failure(
                    f"{self._env.spec.id}: {name} had shape {self._shapes[name]} and now has "
                    f"{array.shape[1:]}, so that no policy can go on with it. Observations must "
                    f"not change their shape: pad them."
                )
            newest = array[:, -1] if self._frames > 1 and name == "obs" else array
            rows[part.t, part.where] = newest

    def _infer(self, rollout: Rollout, part: _Part) -> Did:
        decision = self._policy.act(part.observation, part.recurrent, self._rng)
        if isinstance(decision, Did):
            return decision
        if part.t == 0 and decision.version >= 0 and part is self._parts[0]:
            # Later steps may be of newer versions: the oldest is the rollout's.
            self._newest.version = rollout.head[VERSION] = decision.version
        if part.t == 0 and decision.before is not None:
            self._begin_recurrent(rollout, part, decision.before)
        part.decision = decision
        if len(self._parts) > 1:
            assert isinstance(self._env, Halves)
            try:
                self._env.begin(self._turn, decision.action)
            except Exception as error:
                part.error = error
            self._turn_over(rollout)
        return INFER

    def _simulate(self, rollout: Rollout, part: _Part) -> Did:
        assert part.decision is not None
        did = SIMULATE
        try:
            step = self._step(part, part.decision.action)
        except Failure:
            raise  # what the env can never become again, in its own words
        except Exception as error:
            did, step = REBUILD, self._rebuild(error)
            for other in self._parts:
                if other is not part and other.decision is not None:
                    self._write(rollout, other, _of(step, other.where))
                elif other is not part:
                    self._gap = True  # it has made its rows, and the next do not continue them
            self._look(step.observation)
            step = _of(step, part.where)
        if self._seq == 0 and part.t == 0:
            check_step(self._env.spec, len(step.valid), step)
        self._write(rollout, part, step)
        if part.t == len(rollout.reward):
            self._turn_over(rollout)
        elif self._send is not None and self._sent_early(rollout, part.t):
            part.t = len(rollout.reward)
        return did

    def _turn_over(self, rollout: Rollout) -> None:
        """To the other half, where there is one whose rows are not all made."""
        if self._parts[self._turn - 1].t < len(rollout.reward):
            self._turn = len(self._parts) - 1 - self._turn

    def _step(self, part: _Part, action: Array) -> TimeStep:
        if len(self._parts) == 1:
            step = self._env.step(action)
            self.steps += 1
            return step
        assert isinstance(self._env, Halves)
        if (error := part.error) is not None:
            part.error = None
            raise error
        step = self._env.end(self._turn)
        self.steps += self._turn
        return step

    def _write(self, rollout: Rollout, part: _Part, step: TimeStep) -> None:
        """A part's step, from its decision to what came of it."""
        assert part.decision is not None
        action, part.recurrent, extras, version, _ = part.decision
        part.decision, part.observation = None, step.observation
        t, where = part.t, part.where
        part.t = t + 1
        self._observe(rollout, part)
        rollout.action[t, where] = action
        rollout.reward[t, where] = step.reward
        rollout.terminated[t, where] = step.terminated
        rollout.valid[t, where] = step.valid
        for name, array in extras.items():
            rollout.extras[name][t, where] = array
        if version >= 0 and VERSIONS in rollout.extras:
            rollout.extras[VERSIONS][t, where] = version
        envs, ended = self._ledger.count(step, where)
        if len(envs):
            n = int(rollout.head[EPISODES])
            rollout.episode_table[n : n + len(ended)] = ended
            rollout.head[EPISODES] = n + len(ended)
        if part.recurrent:
            restart(self._policy, part.recurrent, step.terminated | ~step.valid)

    def _rebuild(self, error: Exception) -> TimeStep:
        """An env that raised is made anew. Its episodes are aborted: they have no return, and the
        row that raised is one that only reset, so that values follow where they were cut off."""
        begun = self._ledger.begun
        self.fault = raised(error, str(self.name), self._env.spec.id, self.seed, self.steps, begun)
        self.seed, self.steps = int(self._rng.integers(2**31)), 0
        self._env, observation = remake(self._env, self._make, self.seed)
        self._ledger.clear()
        for part in self._parts:
            part.recurrent = self._policy.initial(len(range(self._env.num_envs)[part.where]))
            part.error = None
        nothing = np.zeros(self._env.num_envs, np.bool_)
        reward = np.zeros((len(nothing), *self._env.spec.reward_leaf.shape), np.float32)
        return TimeStep(observation, reward, nothing, nothing, nothing)

    def _sent_early(self, rollout: Rollout, t: int) -> bool:
        """Is it due now? Then the rest of the rollout is rows that are not valid."""
        assert self._send is not None
        if not self._send(NOTHING, Counts(t, self._newest.version, int(rollout.head[EPISODES]))):
            return False
        self._void(rollout, t)
        return True

    def _push(self, rollout: Rollout) -> Did:
        spoilt = self._spoilt(rollout)
        if spoilt is not None:
            self._look(self._rebuild(spoilt).observation)
            self._gap = True
        steps = int(np.count_nonzero(rollout.valid))
        self.produced += steps
        rollout.head[STEPS], rollout.head[PRODUCED] = steps, self.produced
        self._seq += 1
        assert self._slot is not None
        self._rollouts.push(self._slot)
        self._slot = self._rollout = None
        return PUSH if spoilt is None else REBUILD

    def _spoilt(self, rollout: Rollout) -> Failure | None:
        """An env that gave NaN or infinity would poison the networks: from there on, no row is
        valid. What it gave, and when."""
        floats: Leaves = {"reward": rollout.reward}
        for name, array in rollout.observation.items():
            if array.dtype.kind == "f":
                floats[name] = array
        bad = {name: ~np.isfinite(array) for name, array in floats.items()}
        if not any(where.any() for where in bad.values()):
            return None
        # The row whose reward it is, or whose successor.
        rows = {n: int(np.argwhere(w)[0][0]) - (n != "reward") for n, w in bad.items() if w.any()}
        name = min(rows, key=lambda n: rows[n])
        t, b = np.argwhere(bad[name])[0][:2]
        value, first = floats[name][bad[name]].flat[0], max(0, rows[name])
        episodes = rollout.episodes[np.isfinite(rollout.episodes["return"])]
        rollout.episode_table[: len(episodes)] = episodes
        rollout.head[EPISODES] = len(episodes)
        for observation, array in floats.items():
            if observation != "reward":  # the first one, which all that follows is made equal to
                array[first][bad[observation][first]] = 0
        self._void(rollout, first)
        return Failure(f"{value} in its {name} (env {b}, row {t} of rollout {self._seq})")

    def _void(self, rollout: Rollout, t: int) -> None:
        """From row t on there are only rows that are not valid."""
        for rows in rollout.observation.values():
            rows[t + 1 :] = rows[t]
        for rest in (rollout.action, rollout.reward, rollout.terminated, rollout.valid,
                     *rollout.extras.values()):  # fmt: skip
            rest[t:] = 0


def _copies(leaves: Leaves) -> Leaves:
    return {name: array.copy() for name, array in leaves.items()}


def _of(step: TimeStep, where: slice) -> TimeStep:
    """What it gave to some of the envs."""
    observation = {name: array[where] for name, array in step.observation.items()}
    reward, terminated, truncated, valid = (column[where] for column in step[1:5])
    return TimeStep(observation, reward, terminated, truncated, valid)
