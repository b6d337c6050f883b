"""A built-in battle of two small teams, with the observations, masks and rewards of SMAC."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tianji.env import Discrete, EnvSpec, Score, TimeStep
from tianji.errors import Refusal, nearest
from tianji.role import State, generator_state, load_generator_state
from tianji.types import Array, Leaves, leaf

SIGHT, SHOOT = 9.0, 6.0
"""how far an agent sees, and how far off an enemy may be that it is told to attack"""
SIDE = 32.0
"""of the square that the battle is in"""
APART = 11.0
"""between the middles of the two teams at the start: out of sight"""
LOOPS = 8
"""of the game for one action"""
TICK = 2
"""loops that are simulated at once"""
KILL, WIN, MOST = 10.0, 200.0, 20.0
"""rewards beside the damage done, and what all of them together are scaled to"""
NOTHING, STOP, ATTACK = 0, 1, 6
"""actions; between the last two there are north, south, east and west"""
WAYS = np.array([[0, 0], [0, 0], [0, 1], [0, -1], [1, 0], [-1, 0]], np.float32)
"""where the actions before the attacks go"""


class Kind(NamedTuple):
    """What a unit of StarCraft II is; times in loops of the game, of which there are 22.4 in a
    second, lengths in its cells."""

    name: str
    health: float
    shield: float
    armour: float
    """taken off every hit that reaches the health"""
    armoured: bool
    damage: float
    """of one hit"""
    bonus: float
    """of one hit, where the target is armoured"""
    hits: int
    """in one attack"""
    pause: float
    """loops between two attacks"""
    speed: float
    """cells in a loop"""
    reach: float
    """of its weapon, between the middles of the units"""


MARINE = Kind("marine", 45, 0, 0, False, 6, 0, 1, 0.61 * 22.4, 3.15 / 22.4, SHOOT)
STALKER = Kind("stalker", 80, 80, 1, True, 13, 5, 1, 1.34 * 22.4, 4.13 / 22.4, SHOOT)
ZEALOT = Kind("zealot", 100, 50, 1, False, 8, 0, 2, 0.86 * 22.4, 3.15 / 22.4, 2.0)


class Map(NamedTuple):
    allies: tuple[Kind, ...]
    enemies: tuple[Kind, ...]
    limit: int
    """steps of an episode"""


MAPS = {
    "3m": Map((MARINE,) * 3, (MARINE,) * 3, 60),
    "8m": Map((MARINE,) * 8, (MARINE,) * 8, 120),
    "2s3z": Map((STALKER,) * 2 + (ZEALOT,) * 3, (STALKER,) * 2 + (ZEALOT,) * 3, 120),
    "5m_vs_6m": Map((MARINE,) * 5, (MARINE,) * 6, 70),
}


class Skirmish:
    """B battles that are stepped together. The agents are the allies; each enemy attacks the ally
    that is nearest to it, or walks up to it."""

    def __init__(self, num_envs: int, name: str, lapses: float = 0.1) -> None:
        """`lapses`: share of its steps in which an enemy does nothing; 0 is the hardest."""
        if not 0.0 <= lapses <= 1.0:
            raise Refusal(
                f"lapses = {lapses} is no share of an enemy's steps. Set it between 0 and 1."
            )
        if name not in MAPS:
            raise Refusal(
                f'"skirmish/{name}" is no known battle, so there is nobody to fight.'
                f"{nearest(name, MAPS)} Known: {', '.join(sorted(MAPS))}."
            )
        allies, enemies, limit = MAPS[name]
        self._A, self._E = len(allies), len(enemies)
        units = allies + enemies
        self._health_max = np.array([u.health for u in units], np.float32)
        self._shield_max = np.array([u.shield for u in units], np.float32)
        self._pause = np.array([u.pause for u in units], np.float32)
        self._stride = np.array([u.speed * TICK for u in units], np.float32)
        self._reach = np.array([u.reach for u in units], np.float32)
        raw = [[u.damage + u.bonus * v.armoured for v in units] for u in units]
        hits = np.array([[u.hits] for u in units], np.float32)
        armour = np.array([v.armour for v in units], np.float32)
        self._on_shield = (hits * np.array(raw, np.float32)).astype(np.float32)
        """[attacker, target]: damage of one attack on a shield"""
        self._on_health = (hits * (np.array(raw, np.float32) - armour)).astype(np.float32)
        kinds = list(dict.fromkeys(units))
        self._types = np.zeros((len(units), len(kinds) if len(kinds) > 1 else 0), np.float32)
        if len(kinds) > 1:
            self._types[range(len(units)), [kinds.index(u) for u in units]] = 1.0
        self._shields = bool(self._shield_max.any())
        all_health = self._health_max[self._A :].sum() + self._shield_max[self._A :].sum()
        self._scale = MOST / (all_health + self._E * KILL + WIN)
        self._n = ATTACK + self._E
        self._limit, self._lapses = limit, lapses
        self.num_envs = num_envs
        each = 5 + self._shields + self._types.shape[1]
        obs = 4 + (self._E + self._A - 1) * each + each - 4
        state = self._A * (each - 1) + self._E * (each - 2) + self._A * self._n
        self.spec = EnvSpec(
            f"skirmish/{name}",
            {
                "obs": leaf((self._A, obs), np.float32),
                "state": leaf((state,), np.float32),
                "mask": leaf((self._A, self._n), np.bool_),
                "alive": leaf((self._A,), np.bool_),
            },
            Discrete(self._n),
            limit,
            agents=tuple(f"{u.name}_{i}" for i, u in enumerate(allies)),
        )
        B, U = num_envs, len(units)
        self._rng = np.random.default_rng()
        self._place = np.zeros((B, U, 2), np.float32)
        self._health = np.zeros((B, U), np.float32)
        self._shield = np.zeros((B, U), np.float32)
        self._wait = np.zeros((B, U), np.float32)
        """loops until a unit can attack again"""
        self._last = np.zeros((B, self._A), np.int64)
        """actions of the last step"""
        self._clock = np.zeros(B, np.int64)
        self._ended = np.zeros(B, np.bool_)
        self._mask = np.zeros((B, self._A, self._n), np.bool_)
        self._others = np.array([[j for j in range(self._A) if j != i] for i in range(self._A)])

    def reset(self, seed: int) -> Leaves:
        self._rng = np.random.default_rng(seed)
        self._begin(np.ones(self.num_envs, np.bool_))
        return self._observe()

    def step(self, action: Array) -> TimeStep:
        valid = ~self._ended
        legal = np.take_along_axis(self._mask, action[..., None], axis=2)[..., 0]
        if not legal[valid].all():
            b, a = np.argwhere(valid[:, None] & ~legal)[0]
            raise ValueError(
                f"{self.spec.id}: action {action[b, a]} of agent {a} in env {b} is not legal, its "
                f'mask allows {np.flatnonzero(self._mask[b, a]).tolist()}. Choose by "mask".'
            )
        enemies = np.s_[:, self._A :]
        before = self._health[enemies] + self._shield[enemies]
        orders = self._orders(action)
        for _ in range(LOOPS // TICK):
            self._fight(action, *orders)
        after = self._health[enemies] + self._shield[enemies]
        kills = np.count_nonzero((before > 0) & (after <= 0), axis=1)
        won = ~(after > 0).any(axis=1)
        lost = ~(self._health[:, : self._A] > 0).any(axis=1)
        terminated = (won | lost) & valid
        won &= ~lost & valid
        reward = ((before - after).sum(axis=1) + KILL * kills + WIN * won) * self._scale
        self._clock += 1
        truncated = (self._clock >= self._limit) & valid & ~terminated
        np.copyto(self._last, action)
        if not valid.all():
            self._begin(~valid)
        self._ended = terminated | truncated
        reward = np.where(valid, reward, 0.0).astype(np.float32)
        score = Score(won=won)
        return TimeStep(self._observe(), reward, terminated, truncated, valid, score)

    def render(self) -> Array:
        """Allies in blue, enemies in red, the darker the weaker; the frame is the field's."""
        scale = 8
        side = int(SIDE) * scale
        picture = np.full((side, side, 3), 235, np.uint8)
        picture[[0, -1]] = picture[:, [0, -1]] = 0
        for unit, (x, y) in enumerate(self._place[0]):
            strength = float(self._health[0, unit] / self._health_max[unit])
            if strength > 0:
                column, row = int(x * scale), side - 1 - int(y * scale)
                colour = np.zeros(3)
                colour[2 if unit < self._A else 0] = 90 + 165 * strength
                picture[max(0, row - 3) : row + 4, max(0, column - 3) : column + 4] = colour
        return picture

    def close(self) -> None:
        pass

    def state(self) -> State:
        return {"rng": generator_state(self._rng)} | {k: a.copy() for k, a in self._held().items()}

    def load_state(self, state: State) -> None:
        load_generator_state(self._rng, state["rng"])
        for name, array in self._held().items():
            array[:] = state[name]

    def _held(self) -> Leaves:
        return {
            "place": self._place, "health": self._health, "shield": self._shield,
            "wait": self._wait, "last": self._last, "clock": self._clock, "ended": self._ended,
            "mask": self._mask,
        }  # fmt: skip

    def _begin(self, which: Array) -> None:
        """New battles in these envs: the teams face each other, everyone near its team's middle."""
        units = self._place.shape[1]
        place = self._rng.normal(0.0, 1.0, (self.num_envs, units, 2))
        place += SIDE / 2 + self._rng.normal(0.0, 1.0, (self.num_envs, 1, 2))
        place[:, : self._A, 0] -= APART / 2
        place[:, self._A :, 0] += APART / 2
        self._place[which] = place[which]
        self._health[which] = self._health_max
        self._shield[which] = self._shield_max
        self._wait[which] = 0.0
        self._last[which] = NOTHING
        self._clock[which] = 0

    def _orders(self, action: Array) -> tuple[Array, Array, Array]:
        """[B, U]: at whom each unit aims in this step, whether it is after it, and whether it may
        attack it. An enemy aims at the nearest ally; like an agent, it attacks only whom it had
        near when the step began, and walks up to whom it had not."""
        A, place = self._A, self._place
        apart = place[:, None, :A] - place[:, A:, None]
        far = np.einsum("beax,beax->bea", apart, apart)
        far[np.broadcast_to(self._health[:, None, :A] <= 0, far.shape)] = np.inf
        told = action >= ATTACK
        aims = np.where(told, action - ATTACK + A, 0), far.argmin(axis=2)
        heeds = self._rng.random(far.shape[:2]) >= self._lapses
        near = far.min(axis=2) <= SHOOT**2
        return (
            np.concatenate(aims, axis=1),
            np.concatenate([told, heeds], axis=1),
            np.concatenate([told, near], axis=1),
        )

    def _fight(self, action: Array, target: Array, after: Array, attacks: Array) -> None:
        """All units do what they were told for a tick, at the same time."""
        A, place = self._A, self._place
        alive = self._health > 0
        way = np.take_along_axis(place, target[..., None], axis=1) - place
        distance = np.sqrt(np.einsum("bux,bux->bu", way, way))
        busy = after & alive & np.take_along_axis(alive, target, axis=1)
        near = distance <= self._reach
        self._wait -= TICK
        fires = busy & near & attacks & (self._wait <= 0)
        # What is over of a pause is not lost: attacks keep their rate whatever a tick is.
        self._wait = np.where(fires, self._wait + self._pause, np.maximum(self._wait, 0.0))
        length = np.where(busy & ~near, self._stride / np.maximum(distance, 1e-6), 0.0)
        place += way * length[..., None]
        walks = (
            WAYS[np.where(attacks[:, :A], STOP, action)]
            * (self._stride[:A] * alive[:, :A])[..., None]
        )
        place[:, :A] += walks
        np.clip(place, 0.0, SIDE, out=place)
        if fires.any():
            self._hurt(fires, target)

    def _hurt(self, fires: Array, target: Array) -> None:
        """Damage goes to the shield first; what is left of it, less the armour, to the health."""
        units = np.arange(target.shape[1])
        hit = (fires[..., None] & (target[..., None] == units)).astype(np.float32)
        on_shield = np.einsum("but,ut->bt", hit, self._on_shield)
        on_health = np.einsum("but,ut->bt", hit, self._on_health)
        through = np.maximum(on_shield - self._shield, 0.0)
        share = through / np.maximum(on_shield, 1e-9)
        np.maximum(self._shield - on_shield, 0.0, out=self._shield)
        self._health -= on_health * share
        np.maximum(self._health, 0.0, out=self._health)

    def _observe(self) -> Leaves:
        """In SMAC's order; nobody sees the dead, nor do they see."""
        B, A, E, place = self.num_envs, self._A, self._E, self._place
        alive = self._health > 0
        apart = place[:, None] - place[:, :A, None]  # [B, A, A + E, 2]
        distance = np.sqrt(np.einsum("baux,baux->bau", apart, apart))
        here = alive[:, :A]
        seen = (distance < SIGHT) & alive[:, None] & here[..., None]
        mask = np.zeros((B, A, self._n), np.bool_)
        mask[..., NOTHING] = ~here
        mask[..., STOP] = here
        for way in range(2, ATTACK):
            there = place[:, :A] + WAYS[way]
            mask[..., way] = here & ((there >= 0) & (there <= SIDE)).all(axis=-1)
        mask[..., ATTACK:] = seen[..., A:] & (distance[..., A:] <= SHOOT)
        self._mask = mask
        about = np.concatenate([(self._health / self._health_max)[..., None], *self._bodies()], -1)
        units = np.empty((B, A, A + E, 4 + about.shape[-1]), np.float32)
        units[..., 0] = 1.0
        units[:, :, A:, 0] = mask[..., ATTACK:]
        units[..., 1] = distance / SIGHT
        units[..., 2:4] = apart / SIGHT
        units[..., 4:] = about[:, None]
        units *= seen[..., None]
        friends = units[:, np.arange(A)[:, None], self._others]
        parts = [
            mask[..., 2:ATTACK],
            units[:, :, A:].reshape(B, A, -1),
            friends.reshape(B, A, -1),
            about[:, :A] * here[..., None],
        ]
        obs = np.concatenate(parts, axis=-1, dtype=np.float32)
        return {"obs": obs, "state": self._whole(about, alive), "mask": mask, "alive": here}

    def _whole(self, about: Array, alive: Array) -> Array:
        """All that there is: of allies, of enemies, and what the allies did last."""
        B, A = self.num_envs, self._A
        centred = (self._place - SIDE / 2) / SIDE
        wait = (self._wait / self._pause)[..., None]
        allies = np.concatenate(
            [about[:, :A, :1], wait[:, :A], centred[:, :A], about[:, :A, 1:]], axis=-1
        )
        enemies = np.concatenate([about[:, A:, :1], centred[:, A:], about[:, A:, 1:]], axis=-1)
        allies *= alive[:, :A, None]
        enemies *= alive[:, A:, None]
        did = np.zeros((B, A, self._n), np.float32)
        np.put_along_axis(did, self._last[..., None], 1.0, axis=2)
        did[self._clock == 0] = 0.0
        parts = [allies.reshape(B, -1), enemies.reshape(B, -1), did.reshape(B, -1)]
        return np.concatenate(parts, axis=1, dtype=np.float32)

    def _bodies(self) -> list[Array]:
        """[B, U, k]: shields and kinds of units, where there are any."""
        bodies: list[Array] = []
        if self._shields:
            bodies.append((self._shield / np.maximum(self._shield_max, 1.0))[..., None])
        if self._types.shape[1]:
            bodies.append(np.broadcast_to(self._types, (self.num_envs, *self._types.shape)))
        return bodies
