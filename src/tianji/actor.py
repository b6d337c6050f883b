"""The actor: steps its envs with its policy, straight into the slot it was granted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tianji.algorithm import Acting, Decision, restart
from tianji.channel import Outbox, Slot, Subscriber
from tianji.env import Env, Restorable, TimeStep, check_step, first_observation, remake
from tianji.errors import Failure
from tianji.fault import Fault, raised
from tianji.role import Did, State, generator_state, load_generator_state
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
    Leaves,
    Params,
    Rollout,
)

LOAD, INFER, SIMULATE = Did("load"), Did("infer"), Did("simulate")
REBUILD = Did("rebuild")
NO_GRANT, NO_VERSION = Did(waits="buffer"), Did(waits="learner")
NOTHING = Counts()


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
    ) -> None:
        """A grant for update k is begun with version k - `behind` or a newer one; without
        `snapshots`, the policy is elsewhere and has its own. `make` makes the env anew where it
        raised; `send` says when a rollout is pushed before it is full."""
        self.name = f"actor-{index}"
        self.produced = 0
        """valid steps so far"""
        self.steps = 0
        """steps that each env has made since it was built"""
        self.seed = seed
        """of the env as it is now"""
        self.fault: Fault | None = None
        """why the env was made anew; set when `step` returns REBUILD"""
        self._index = index
        self._env = env
        self._make = make
        self._policy = policy
        self._rollouts = rollouts
        self._snapshots = snapshots
        self._behind = behind
        self._send = send
        self._rng = rng
        self._params = Params(policy.shapes)
        self._version = -1
        self._observation = first_observation(env, seed)
        self._recurrent = policy.initial(env.num_envs)
        self._returns = np.zeros(env.num_envs, np.float64)
        self._lengths = np.zeros(env.num_envs, np.int64)
        self._seq = 0
        self._gap = True
        self._slot: Slot | None = None
        self._rollout: Rollout | None = None
        self._t = 0
        self._half = -1
        """rows of a rollout that was half made when the state was taken; -1: none was"""
        self._decision: Decision | None = None

    @property
    def version(self) -> int:
        """Of the policy that acts; -1 before the first."""
        return self._version

    def step(self) -> Did:
        if self._rollout is None:
            return self._begin()
        if self._decision is None:
            observation = {name: rows[self._t] for name, rows in self._rollout.observation.items()}
            decision = self._policy.act(observation, self._recurrent, self._rng)
            if isinstance(decision, Did):
                return decision
            if self._t == 0 and decision.version >= 0:
                # Later steps may be of newer versions: the oldest is the rollout's.
                self._version = self._rollout.head[VERSION] = decision.version
            self._decision = decision
            return INFER
        did = self._simulate(self._rollout, self._decision)
        self._decision = None
        return did

    def follow(self, produced: int, seq: int) -> None:
        """Take the place of an actor that died after so many valid steps and rollouts."""
        self.produced, self._seq = produced, seq

    def state(self) -> State:
        """A rollout that is half made lies in the channel's memory; here is how far it is."""
        state: State = {
            "produced": self.produced,
            "seq": self._seq,
            "gap": self._gap,
            "t": self._t if self._rollout is not None else self._half,
            "version": self._version,
            "params": self._params.flat.copy(),
            "rng": generator_state(self._rng),
            "returns": self._returns.copy(),
            "lengths": self._lengths.copy(),
            "recurrent": {name: array.copy() for name, array in self._recurrent.items()},
            "observation": {name: array.copy() for name, array in self._observation.items()},
            "decision": None,
        }
        if self._decision is not None:
            action, recurrent, extras, _ = self._decision
            state["decision"] = {
                "action": action.copy(),
                "state": {name: array.copy() for name, array in recurrent.items()},
                "extras": {name: array.copy() for name, array in extras.items()},
            }
        if isinstance(self._env, Restorable) and self._snapshots is not None:
            state["env"] = self._env.state()
        return state

    def load_state(self, state: State) -> None:
        """Go on where the state was taken. Without the env's state, from a fresh reset: a rollout
        that was half made is begun again, and windows do not reach across."""
        self.produced, self._seq = state["produced"], state["seq"]
        load_generator_state(self._rng, state["rng"])
        if not self.exact(state):
            # Not the seed of the run's beginning: its first episodes would be played again.
            self.seed = int(self._rng.integers(2**31))
            self._observation = first_observation(self._env, self.seed)
            return
        assert isinstance(self._env, Restorable)
        self._env.load_state(state["env"])
        self._gap, self._version = state["gap"], state["version"]
        np.copyto(self._params.flat, state["params"])
        if self._version >= 0:
            self._policy.load(self._params)
        self._returns[:], self._lengths[:] = state["returns"], state["lengths"]
        self._recurrent, self._observation = state["recurrent"], state["observation"]
        self._half = state["t"]
        if state["decision"] is not None:
            self._decision = Decision(**state["decision"])

    def exact(self, state: State) -> bool:
        """Can this actor go on exactly from the state? Not where a server knows its episodes."""
        known = self._snapshots is not None
        return known and "env" in state and isinstance(self._env, Restorable)

    def close(self) -> None:
        self._env.close()

    def _begin(self) -> Did:
        """Take the next grant, once the version that it asks for is here."""
        if (slot := self._rollouts.reserve()) is None:
            return NO_GRANT
        if self._half >= 0:
            self._open(slot)
            self._t, self._half = self._half, -1
            return LOAD
        if self._snapshots is not None:
            newest = self._snapshots.probe(self._version, self._params.flat)
            if newest > self._version:
                self._version = newest
                self._policy.load(self._params)
                return LOAD
            if self._version < 0 or self._version < slot.tag - self._behind:
                return NO_VERSION
        rollout = self._open(slot)
        for name, rows in rollout.observation.items():
            rows[0] = self._observation[name]
        head = rollout.head
        head[VERSION], head[SOURCE], head[SEQ] = self._version, self._index, self._seq
        head[UPDATE], head[EPISODES], head[GAP] = slot.tag, 0, self._gap
        self._gap = False
        self._t = 0
        return LOAD

    def _open(self, slot: Slot) -> Rollout:
        self._slot, self._rollout = slot, Rollout.over(slot.arrays)
        return self._rollout

    def _simulate(self, rollout: Rollout, decision: Decision) -> Did:
        t = self._t
        action, self._recurrent, extras, _ = decision
        did = SIMULATE
        try:
            observation, reward, terminated, truncated, valid = self._env.step(action)
            self.steps += 1
        except Exception as error:
            did = REBUILD
            observation, reward, terminated, truncated, valid = self._rebuild(error)
        if self._seq == 0 and t == 0:
            check_step(self._env, observation, reward, terminated, truncated, valid)
        for name, rows in rollout.observation.items():
            rows[t + 1] = observation[name]
        rollout.action[t] = action
        rollout.reward[t] = reward
        rollout.terminated[t] = terminated
        rollout.valid[t] = valid
        for name, array in extras.items():
            rollout.extras[name][t] = array
        self._count_episodes(rollout, terminated | truncated, valid | truncated)
        if self._recurrent:
            restart(self._policy, self._recurrent, terminated | ~valid)
        self._t = t + 1
        if self._t == len(rollout.reward) or (self._send is not None and self._sent_early(rollout)):
            return self._finish(rollout, did)
        return did

    def _rebuild(self, error: Exception) -> TimeStep:
        """An env that raised is made anew. Its episodes are aborted: they have no return, and the
        row that raised is one that only reset, so that values follow where they were cut off."""
        begun = int(np.count_nonzero(self._lengths))
        self.fault = raised(error, self.name, self._env.spec.id, self.seed, self.steps, begun)
        self.seed, self.steps = int(self._rng.integers(2**31)), 0
        self._env, observation = remake(self._env, self._make, self.seed)
        self._returns[:], self._lengths[:] = 0.0, 0
        self._recurrent = self._policy.initial(self._env.num_envs)
        nothing = np.zeros(self._env.num_envs, np.bool_)
        return TimeStep(observation, np.zeros(len(nothing), np.float32), nothing, nothing, nothing)

    def _count_episodes(self, rollout: Rollout, ended: np.ndarray, real: np.ndarray) -> None:
        self._returns += rollout.reward[self._t]
        self._lengths += real
        if np.count_nonzero(ended):
            n = int(rollout.head[EPISODES])
            (where,) = np.nonzero(ended)
            table = rollout.episode_table[n : n + len(where)]
            table["return"], table["length"] = self._returns[where], self._lengths[where]
            rollout.head[EPISODES] = n + len(where)
            self._returns[where] = 0.0
            self._lengths[where] = 0

    def _sent_early(self, rollout: Rollout) -> bool:
        """Is it due now? Then the rest of the rollout is rows that are not valid."""
        assert self._send is not None
        t = self._t
        if not self._send(NOTHING, Counts(t, self._version, int(rollout.head[EPISODES]))):
            return False
        self._void(rollout, t)
        return True

    def _finish(self, rollout: Rollout, did: Did) -> Did:
        spoilt = self._spoilt(rollout)
        if spoilt is not None:
            did = REBUILD
            step = self._rebuild(spoilt)
            self._observation, self._gap = step.observation, True
        else:
            observation = rollout.observation.items()
            self._observation = {name: rows[-1].copy() for name, rows in observation}
        steps = int(np.count_nonzero(rollout.valid))
        self.produced += steps
        rollout.head[STEPS], rollout.head[PRODUCED] = steps, self.produced
        self._seq += 1
        assert self._slot is not None
        self._rollouts.push(self._slot)
        self._slot = self._rollout = None
        return did

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
