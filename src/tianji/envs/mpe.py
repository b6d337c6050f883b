"""The multi-agent particle environments (Lowe et al. 2017), B worlds at once in numpy.

The physics, observations and rewards are those of the package mpe2, step by step; the random
numbers that episodes begin with are our own.
"""

from __future__ import annotations

import numpy as np

from tianji.env import Action, Continuous, Discrete, EnvSpec, Score, TimeStep
from tianji.errors import Refusal
from tianji.role import State, generator_state, load_generator_state
from tianji.types import Array, Leaves, leaf

DT = 0.1
"""seconds of a step"""
DAMPING = 0.25
"""share of its velocity that an agent loses in a step"""
CONTACT_FORCE, CONTACT_MARGIN = 1e2, 1e-3
"""how hard and how softly bodies push each other away"""
PUSH = 5.0
"""force of an action, where an agent has no other"""
MOVES = np.array([[0, 0], [-1, 0], [1, 0], [0, -1], [0, 1]], np.float64)
"""nothing, left, right, down, up"""
COVERED = 0.1
"""an agent that is nearer to a landmark than this covers it"""
PIXELS = 350
"""sides of a picture"""
BLUE, GREEN, RED, GREY = (70, 70, 170), (70, 170, 70), (170, 70, 70), (50, 50, 50)

Colour = tuple[int, int, int]


class Particles:
    """What the worlds share: agents that push themselves through a plane with landmarks.

    Every agent has a reward of its own. "obs" of agents that see less is padded with zeros;
    "state" is all that all agents see, one after the other, without the padding. Episodes are
    truncated after `max_cycles` steps.
    """

    def __init__(
        self,
        id: str,
        num_envs: int,
        agents: tuple[str, ...],
        landmarks: int,
        widths: tuple[int, ...],
        max_cycles: int,
        continuous_actions: bool,
        dynamic_rescaling: bool,
    ) -> None:
        """`dynamic_rescaling`: in a picture, circles shrink with distances when agents leave."""
        if max_cycles < 1:
            raise Refusal(f"{id} would end before its first step. Set max_cycles to 1 or more.")
        A, n = len(agents), len(MOVES)
        action: Action = (
            Continuous((0.0,) * n, (1.0,) * n, (n,)) if continuous_actions else Discrete(n)
        )
        observation = {
            "obs": leaf((A, max(widths)), np.float32),
            "state": leaf((sum(widths),), np.float32),
        }
        self.spec = EnvSpec(
            id, observation, action, max_cycles, agents, own_rewards=True, widths=widths
        )
        self.num_envs = num_envs
        self._A = A
        self._limit = max_cycles
        self._continuous = continuous_actions
        self._rescaling = dynamic_rescaling
        self._rng = np.random.default_rng()
        self._clock = np.zeros(num_envs, np.int64)
        self._ended = np.zeros(num_envs, np.bool_)
        self._place = np.zeros((num_envs, A + landmarks, 2))
        """of agents, then of landmarks"""
        self._velocity = np.zeros((num_envs, A, 2))
        self._me = np.arange(A)[:, None]
        self._others = _others(A)
        self._size = np.full(A + landmarks, 0.05)
        self._push = np.full((A, 1), PUSH)
        self._fastest: Array | None = None
        """[A]: speeds that agents cannot exceed"""
        self._solid = 0
        """entities, of the first in their order, that push each other away"""

    def reset(self, seed: int) -> Leaves:
        self._rng = np.random.default_rng(seed)
        self._begin(np.ones(self.num_envs, np.bool_))
        self._ended[:] = False
        return self._look(self._relative())

    def step(self, action: Array) -> TimeStep:
        begins = self._ended
        valid = ~begins
        self._move(self._force(action))
        self._clock += 1
        if begins.any():
            self._begin(begins)
        relative = self._relative()
        distance = np.sqrt(np.square(relative).sum(-1))
        truncated = valid & (self._clock >= self._limit)
        terminated = self._done(distance) & valid & ~truncated
        self._ended = terminated | truncated
        reward = np.where(valid[:, None], self._reward(distance), 0.0).astype(np.float32)
        reported = Score(self._reported(reward))
        return TimeStep(self._look(relative), reward, terminated, truncated, valid, reported)

    def render(self) -> Array:
        picture = np.full((PIXELS, PIXELS, 3), 255, np.uint8)
        place = self._place[0]
        reach = max(1.0, float(np.abs(place).max()))
        scale = 0.45 * PIXELS / reach  # pixels a unit, with a margin for circles at the edge
        y, x = np.mgrid[:PIXELS, :PIXELS] + 0.5
        radii = self._size * (scale if self._rescaling else 0.45 * PIXELS)
        drawn = list(zip(place, radii, self._colours(), strict=True))
        for (right, up), radius, colour in reversed(drawn):
            away = np.hypot(x - PIXELS / 2 - right * scale, y - PIXELS / 2 + up * scale)
            picture[away <= radius] = colour
            picture[np.abs(away - radius) <= 0.5] = 0
        return picture

    def close(self) -> None:
        pass

    def state(self) -> State:
        return {
            "rng": generator_state(self._rng),
            "clock": self._clock.copy(),
            "ended": self._ended.copy(),
            "place": self._place.copy(),
            "velocity": self._velocity.copy(),
        }

    def load_state(self, state: State) -> None:
        if len(state["clock"]) != self.num_envs:
            raise Refusal(
                f"the state holds {len(state['clock'])} envs and this run has {self.num_envs}, so "
                f"it cannot go on where it was. Set num_envs to {len(state['clock'])}."
            )
        load_generator_state(self._rng, state["rng"])
        self._clock[:] = state["clock"]
        self._ended = np.array(state["ended"])
        self._place[:] = state["place"]
        self._velocity[:] = state["velocity"]

    def _begin(self, which: Array) -> None:
        """Episodes begin in these envs: everything somewhere, at rest."""
        n = int(which.sum())
        self._place[which] = self._rng.uniform(-1, 1, (n, *self._place.shape[1:]))
        self._velocity[which] = 0
        self._clock[which] = 0

    def _force(self, action: Array) -> Array:
        """[B, A, 2]: what the agents' own actions do."""
        if self._continuous:
            given = np.clip(action, 0, 1)
            along = np.stack(
                [given[..., 2] - given[..., 1], given[..., 4] - given[..., 3]], axis=-1
            )
            return along.astype(np.float64) * self._push  # type: ignore[no-any-return]
        return MOVES[action] * self._push  # type: ignore[no-any-return]

    def _move(self, force: Array) -> None:
        """One step of the physics: forces of contact, then places, then velocities."""
        if self._solid:
            for contact in self._contacts():
                force = contact + force
        place = self._place[:, : self._A]
        place += self._velocity * DT
        self._velocity = self._velocity * (1 - DAMPING) + force * DT
        if self._fastest is not None:
            speed = np.sqrt(np.square(self._velocity).sum(-1))
            limit = np.where(speed > self._fastest, self._fastest, 1.0)
            slowed = self._velocity / np.where(speed > 0, speed, 1.0)[..., None] * limit[..., None]
            fast = (speed > self._fastest)[..., None]
            self._velocity = np.where(fast, slowed, self._velocity)

    def _contacts(self) -> Array:
        """[solid, B, A, 2]: the force of each solid entity on each agent, 0 on itself."""
        solid = self._place[:, : self._solid]
        away = self._place[None, :, : self._A] - solid.swapaxes(0, 1)[:, :, None]
        distance = np.sqrt(np.square(away).sum(-1))
        touching = (self._size[: self._solid, None] + self._size[: self._A])[:, None]
        depth = np.logaddexp(0, -(distance - touching) / CONTACT_MARGIN) * CONTACT_MARGIN
        direction = CONTACT_FORCE * away / np.where(distance == 0, 1.0, distance)[..., None]
        return direction * depth[..., None]  # type: ignore[no-any-return]

    def _relative(self) -> Array:
        """[B, A, E, 2]: from each agent to each entity."""
        return self._place[:, None] - self._place[:, : self._A, None]

    def _look(self, relative: Array) -> Leaves:
        obs = self._observe(relative).astype(np.float32)
        widths = self.spec.widths
        if min(widths) == max(widths):
            return {"obs": obs, "state": obs.reshape(self.num_envs, -1)}
        parts = [obs[:, i, :width] for i, width in enumerate(widths)]
        return {"obs": obs, "state": np.concatenate(parts, axis=1)}

    def _collides(self, distance: Array) -> Array:
        """[B, A, A] bool: which agents overlap; each one itself, too."""
        size = self._size[: self._A]
        return distance[:, :, : self._A] < size[:, None] + size  # type: ignore[no-any-return]

    def _observe(self, relative: Array) -> Array:
        """[B, A, W], what each agent sees, by where everything is from there."""
        raise NotImplementedError

    def _reward(self, distance: Array) -> Array:
        """[B, A], by the distances [B, A, E] from agents to entities."""
        raise NotImplementedError

    def _reported(self, reward: Array) -> Array:
        """[B], of the rewards [B, A]."""
        raise NotImplementedError

    def _done(self, distance: Array) -> Array:
        """[B] bool: is what the agents are meant to do done, and does that end an episode?"""
        return np.zeros(self.num_envs, np.bool_)

    def _colours(self) -> list[Colour]:
        """Of the first env's entities."""
        raise NotImplementedError


def _others(n: int) -> Array:
    """[n, n - 1]: the numbers of all but each one."""
    numbers = [[j for j in range(n) if j != i] for i in range(n)]
    return np.array(numbers, np.int64).reshape(n, n - 1)


def _flat(x: Array) -> Array:
    """Pairs of numbers, [B, A, k, 2] as [B, A, 2 k]."""
    return x.reshape(*x.shape[:2], -1)


class SimpleSpread(Particles):
    """N agents must cover N landmarks and not collide.

    All are rewarded by minus the distance from each landmark to the agent next to it, weighted
    1 - `local_ratio`; an agent loses `local_ratio` for each other that it overlaps. An agent sees
    its velocity, its place, the landmarks, the others, and what the others say, which is nothing.
    Reported is the sum over the agents, as the curves of the paper's own code are.
    """

    def __init__(
        self,
        num_envs: int,
        N: int = 3,
        local_ratio: float = 0.5,
        max_cycles: int = 25,
        continuous_actions: bool = False,
        dynamic_rescaling: bool = True,
        terminate_on_success: bool = False,
    ) -> None:
        """`terminate_on_success`: an episode terminates where all landmarks are covered."""
        if N < 1:
            raise Refusal(f"simple_spread with N = {N} has no agent. Set N to 1 or more.")
        if not 0 <= local_ratio <= 1:
            raise Refusal(
                f"local_ratio = {local_ratio} is no share, so that rewards would have the wrong "
                f"sign. Set it between 0 and 1."
            )
        super().__init__(
            "mpe/simple_spread",
            num_envs,
            tuple(f"agent_{i}" for i in range(N)),
            N,
            (4 + 2 * N + 4 * (N - 1),) * N,
            max_cycles,
            continuous_actions,
            dynamic_rescaling,
        )
        self._size[:N] = 0.15
        self._solid = N
        self._ratio = local_ratio
        self._terminates = terminate_on_success

    def _observe(self, relative: Array) -> Array:
        A = self._A
        said = np.zeros((self.num_envs, A, 2 * (A - 1)))
        landmarks, others = relative[:, :, A:], relative[:, self._me, self._others]
        parts = [self._velocity, self._place[:, :A], _flat(landmarks), _flat(others), said]
        return np.concatenate(parts, axis=-1)

    def _reward(self, distance: Array) -> Array:
        # One landmark after the other: mpe2 adds them up in this order.
        together = -np.add.accumulate(distance[:, :, self._A :].min(axis=1), axis=1)[:, -1:]
        own = 1.0 - self._collides(distance).sum(-1)
        return together * (1 - self._ratio) + own * self._ratio  # type: ignore[no-any-return]

    def _reported(self, reward: Array) -> Array:
        return reward.sum(axis=1)  # type: ignore[no-any-return]

    def _done(self, distance: Array) -> Array:
        if not self._terminates:
            return super()._done(distance)
        nearest = distance[:, :, self._A :].min(axis=1)
        return np.all(nearest < COVERED, axis=1)  # type: ignore[no-any-return]

    def _colours(self) -> list[Colour]:
        return [BLUE] * self._A + [GREY] * self._A


class SimpleTag(Particles):
    """Adversaries, slower and larger, hunt good agents among obstacles.

    All adversaries get 10 for each pair of one of them and a good agent that overlap; the good
    agent loses 10 for it, and more the farther it leaves the field. An agent sees its velocity, its
    place, the obstacles, the others, and how fast the good ones of them move. Reported is the mean
    over the adversaries, who have one reward and must hunt together.
    """

    def __init__(
        self,
        num_envs: int,
        num_good: int = 1,
        num_adversaries: int = 3,
        num_obstacles: int = 2,
        max_cycles: int = 25,
        continuous_actions: bool = False,
        dynamic_rescaling: bool = True,
        terminate_on_success: bool = False,
    ) -> None:
        """`terminate_on_success`: an episode terminates where all good agents are caught."""
        if num_good < 1 or num_adversaries < 1 or num_obstacles < 0:
            raise Refusal(
                f"simple_tag with num_good = {num_good}, num_adversaries = {num_adversaries} and "
                f"num_obstacles = {num_obstacles} is no hunt. Set the first two to 1 or more and "
                f"the last to 0 or more."
            )
        hunters = tuple(f"adversary_{i}" for i in range(num_adversaries))
        hunted = tuple(f"agent_{i}" for i in range(num_good))
        A, H = num_good + num_adversaries, num_adversaries
        width = 4 + 2 * num_obstacles + 2 * (A - 1) + 2 * num_good
        super().__init__(
            "mpe/simple_tag",
            num_envs,
            hunters + hunted,
            num_obstacles,
            (width,) * H + (width - 2,) * num_good,
            max_cycles,
            continuous_actions,
            dynamic_rescaling,
        )
        self._hunters = H
        self._fellows = _others(num_good)
        self._size[:H], self._size[H:A], self._size[A:] = 0.075, 0.05, 0.2
        self._push[:H], self._push[H:] = 3.0, 4.0
        self._fastest = np.where(np.arange(A) < H, 1.0, 1.3)
        self._solid = A + num_obstacles
        self._terminates = terminate_on_success

    def _begin(self, which: Array) -> None:
        super()._begin(which)
        self._place[:, self._A :][which] *= 0.9  # uniform in -0.9 to 0.9

    def _observe(self, relative: Array) -> Array:
        A, H = self._A, self._hunters
        obs = np.zeros((self.num_envs, *self.spec.observation["obs"].shape))
        landmarks, others = relative[:, :, A:], relative[:, self._me, self._others]
        parts = [self._velocity, self._place[:, :A], _flat(landmarks), _flat(others)]
        seen = np.concatenate(parts, axis=-1)
        near, hunted = seen.shape[-1], self._velocity[:, H:]
        obs[:, :, :near] = seen
        obs[:, :H, near:] = hunted.reshape(self.num_envs, 1, -1)
        obs[:, H:, near:-2] = _flat(hunted[:, self._fellows])
        return obs

    def _reward(self, distance: Array) -> Array:
        H = self._hunters
        caught = self._collides(distance)[:, H:, :H].sum(-1)  # [B, good]
        far = np.abs(self._place[:, H : self._A])
        leaving = np.minimum(np.exp(2 * np.minimum(far, 3.0) - 2), 10.0)
        leaving = np.where(far < 0.9, 0.0, np.where(far < 1.0, (far - 0.9) * 10, leaving))
        hunted = -10.0 * caught - leaving[..., 0] - leaving[..., 1]
        hunting = np.repeat(10.0 * caught.sum(-1, keepdims=True), H, axis=1)
        return np.concatenate([hunting, hunted], axis=1)

    def _reported(self, reward: Array) -> Array:
        return reward[:, : self._hunters].mean(axis=1)  # type: ignore[no-any-return]

    def _done(self, distance: Array) -> Array:
        if not self._terminates:
            return super()._done(distance)
        H = self._hunters
        caught: Array = np.any(self._collides(distance)[:, H:, :H], axis=2)
        return np.all(caught, axis=1)  # type: ignore[no-any-return]

    def _colours(self) -> list[Colour]:
        good, obstacles = self._A - self._hunters, self._place.shape[1] - self._A
        return [RED] * self._hunters + [GREEN] * good + [GREY] * obstacles


class SimpleAdversary(Particles):
    """N good agents know which of N landmarks is the goal, one adversary does not.

    Good agents get the adversary's distance from the goal minus that of the nearest of them; the
    adversary gets minus its own. A good agent sees the goal, the landmarks and the others, the
    adversary the last two. Reported is the mean over the good agents, who have one reward and must
    both reach the goal and hide it.
    """

    def __init__(
        self,
        num_envs: int,
        N: int = 2,
        max_cycles: int = 25,
        continuous_actions: bool = False,
        dynamic_rescaling: bool = True,
    ) -> None:
        if N < 1:
            raise Refusal(f"simple_adversary with N = {N} has no good agent. Set N to 1 or more.")
        super().__init__(
            "mpe/simple_adversary",
            num_envs,
            ("adversary_0", *(f"agent_{i}" for i in range(N))),
            N,
            (4 * N, *(4 * N + 2,) * N),
            max_cycles,
            continuous_actions,
            dynamic_rescaling,
        )
        self._size[: N + 1], self._size[N + 1 :] = 0.15, 0.08
        self._goal = np.zeros(num_envs, np.int64)
        """the landmark that is it"""
        self._every = np.arange(num_envs)

    def state(self) -> State:
        return super().state() | {"goal": self._goal.copy()}

    def load_state(self, state: State) -> None:
        super().load_state(state)
        self._goal[:] = state["goal"]

    def _begin(self, which: Array) -> None:
        super()._begin(which)
        self._goal[which] = self._rng.integers(self._A - 1, size=int(which.sum()))

    def _observe(self, relative: Array) -> Array:
        A = self._A
        goal = relative[self._every, :, A + self._goal]  # [B, A, 2]
        landmarks, others = relative[:, :, A:], relative[:, self._me, self._others]
        obs = np.concatenate([goal, _flat(landmarks), _flat(others)], axis=-1)
        obs[:, 0, :-2] = obs[:, 0, 2:]
        obs[:, 0, -2:] = 0
        return obs

    def _reward(self, distance: Array) -> Array:
        away = distance[self._every, :, self._A + self._goal]  # [B, A]
        good = away[:, :1] - away[:, 1:].min(axis=1, keepdims=True)
        return np.concatenate([-away[:, :1], np.repeat(good, self._A - 1, axis=1)], axis=1)

    def _reported(self, reward: Array) -> Array:
        return reward[:, 1:].mean(axis=1)  # type: ignore[no-any-return]

    def _colours(self) -> list[Colour]:
        landmarks = [GREY] * (self._A - 1)
        landmarks[int(self._goal[0])] = GREEN
        return [RED] + [BLUE] * (self._A - 1) + landmarks
