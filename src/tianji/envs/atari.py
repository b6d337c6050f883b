"""Games of the Arcade Learning Environment, stepped by its own threads."""

from __future__ import annotations

from typing import Any

import numpy as np

from tianji.env import Discrete, EnvSpec, Score, TimeStep
from tianji.errors import Refusal, nearest
from tianji.types import Array, Leaves, leaf

SCREEN = (210, 160)
"""pixels of a game's own picture"""


class Atari:
    """B copies of one game, as in Mnih et al. 2015 and Machado et al. 2018: grey pictures, the last
    few of them stacked; after a reset, what is older than the first one is zeros."""

    def __init__(
        self,
        num_envs: int,
        name: str,
        sticky: float = 0.25,
        clip_reward: bool = True,
        episodic_life: bool = False,
        fire_reset: bool = True,
        noop_max: int = 30,
        frameskip: int = 4,
        frames: int = 4,
        size: int = 84,
        grayscale: bool = True,
        full_action_space: bool = False,
        max_frames: int = 108_000,
        time_limit: int | None = None,
        threads: int = 1,
        halves: bool = False,
        render: bool = False,
    ) -> None:
        """`sticky` is the probability that an action is repeated, `clip_reward` learns from the
        sign of rewards, `episodic_life` terminates at a lost life while the game goes on. A game is
        cut after `max_frames` of its own, or `time_limit` steps."""
        id = f"ALE/{name}"
        game = _game(id, name)
        _check(id, sticky, noop_max, frameskip, frames, size, max_frames)
        from ale_py.vector_env import AtariVectorEnv

        if time_limit is not None:
            max_frames = min(max_frames, time_limit * frameskip)
        # Whoever plays the same actions from the same seed sees the same game.
        same: dict[str, Any] = {
            "repeat_action_probability": sticky,
            "use_fire_reset": fire_reset,
            "noop_max": noop_max,
            "frameskip": frameskip,
            "full_action_space": full_action_space,
            "max_num_frames_per_episode": max_frames,
            "reward_clipping": False,
        }
        look: dict[str, Any] = {"img_height": size, "img_width": size}
        look |= {"grayscale": grayscale, "stack_num": frames}
        first = num_envs // 2 if halves else 0
        self._parts = [
            _Part(AtariVectorEnv(game, n, num_threads=min(threads, n), **same, **look))
            for n in (first, num_envs - first)
            if n
        ]
        self._twin: Any = None
        """the first env once more, in colours and with its own size"""
        if render:
            look = {"img_height": SCREEN[0], "img_width": SCREEN[1]}
            look |= {"grayscale": False, "stack_num": 1}
            self._twin = AtariVectorEnv(game, 1, num_threads=1, **same, **look)
        self._picture: Array = np.zeros((*SCREEN, 3), np.uint8)
        self._sign, self._lives = clip_reward, episodic_life
        native = self._parts[0].vector
        self.num_envs = num_envs
        self.spec = EnvSpec(
            id,
            {"obs": leaf(native.single_observation_space.shape, np.uint8)},
            Discrete(int(native.single_action_space.n)),
            -(-max_frames // frameskip),
            frames=frames,
        )

    def reset(self, seed: int) -> Leaves:
        words = np.random.SeedSequence(seed).generate_state(self.num_envs)
        seeds = (words & 0x7FFFFFFF).astype(np.int32)
        if self._twin is not None:
            picture, _ = self._twin.reset(seed=seeds[:1])
            self._picture = picture[0, 0]
        begin, seen = 0, []
        for part in self._parts:
            n = part.vector.num_envs
            observation, info = part.vector.reset(seed=seeds[begin : begin + n])
            part.over, part.lives = np.zeros(n, np.bool_), info["lives"]
            begin += n
            seen.append(observation)
        return {"obs": seen[0] if len(seen) == 1 else np.concatenate(seen)}

    def step(self, action: Array) -> TimeStep:
        if self._twin is not None:
            picture, *_ = self._twin.step(action[:1])
            self._picture = picture[0, 0]
        if len(self._parts) == 1:
            self._parts[0].vector.send(action)
            return self._received(self._parts[0])
        first = self._parts[0].vector.num_envs
        self.begin(0, action[:first])
        self.begin(1, action[first:])
        return _joined(self.end(0), self.end(1))

    def begin(self, half: int, action: Array) -> None:
        self._parts[half].vector.send(action)

    def end(self, half: int) -> TimeStep:
        return self._received(self._parts[half])

    def render(self) -> Array:
        if self._twin is None:
            raise Refusal(f"{self.spec.id} was made without pictures. Make it with render=True.")
        return self._picture

    def close(self) -> None:
        for part in self._parts:
            part.vector.close()
        if self._twin is not None:
            self._twin.close()

    def _received(self, part: _Part) -> TimeStep:
        observation, raw, terminated, truncated, info = part.vector.recv()
        raw = raw.astype(np.float32)
        valid = ~part.over
        part.over = over = terminated | truncated
        if self._lives:
            lives, part.lives = part.lives, info["lives"]
            # A reset row has more lives than the game's last one.
            terminated = terminated | (part.lives < lives)
        truncated = truncated & ~terminated
        reward = np.sign(raw) if self._sign else raw
        return TimeStep(
            {"obs": observation}, reward, terminated, truncated, valid, Score(raw, over)
        )


class _Part:
    """Games that are stepped together by a vector env of their own."""

    def __init__(self, vector: Any) -> None:
        self.vector = vector
        self.over: Array = np.zeros(vector.num_envs, np.bool_)
        """where the next step only resets"""
        self.lives: Array = np.zeros(vector.num_envs, np.int32)


def _joined(one: TimeStep, other: TimeStep) -> TimeStep:
    assert one.score.reward is not None
    assert one.score.ended is not None
    assert other.score.reward is not None
    assert other.score.ended is not None
    columns = (np.concatenate(pair) for pair in zip(one[1:5], other[1:5], strict=True))
    reward, terminated, truncated, valid = columns
    return TimeStep(
        {"obs": np.concatenate([one.observation["obs"], other.observation["obs"]])},
        reward,
        terminated,
        truncated,
        valid,
        Score(
            np.concatenate([one.score.reward, other.score.reward]),
            np.concatenate([one.score.ended, other.score.ended]),
        ),
    )


def _game(id: str, name: str) -> str:
    """ALE's own name of "Pong-v5" and the like."""
    try:
        from ale_py import roms
        from ale_py.registration import rom_id_to_name
    except ImportError as error:
        raise Refusal(
            f"{id} needs ale-py, which is not installed, so no step can be made: {error}. "
            f"Remedy: pip install 'tianji[atari]'."
        ) from error
    known = {f"{rom_id_to_name(rom)}-v5": rom for rom in roms.get_all_rom_ids()}
    if name not in known:
        raise Refusal(
            f'env.id = "{id}" is no game that ale-py knows, so there is nothing to train on.'
            f"{nearest(id, [f'ALE/{game}' for game in known])} Known: "
            f"{', '.join(sorted(game.removesuffix('-v5') for game in known))}, each as ALE/NAME-v5."
        )
    return known[name]


def _check(
    id: str, sticky: float, noop_max: int, frameskip: int, frames: int, size: int, max_frames: int
) -> None:
    """The emulator itself would crash by some of these."""
    counts = {"frameskip": frameskip, "frames": frames, "size": size, "max_frames": max_frames}
    counts["noop_max"] = noop_max
    for key, value in counts.items():
        least = 0 if key == "noop_max" else 1
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise Refusal(
                f"env.kwargs.{key} = {value!r} is nothing that {id} could be played with. It must "
                f"be a whole number, {least} or more."
            )
    if isinstance(sticky, bool) or not isinstance(sticky, float | int) or not 0 <= sticky <= 1:
        raise Refusal(
            f"env.kwargs.sticky = {sticky!r} is no probability of repeating an action. Set it from "
            f"0 to 1."
        )
