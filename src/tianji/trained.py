"""What a run has learnt, loaded from its checkpoint: to act, to be evaluated, to be watched."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tianji.algorithm import Policy, Spec
from tianji.buffer import ARRIVAL
from tianji.build import EVAL_ENVS
from tianji.checkpoint import Checkpoints
from tianji.config import Config, load_config
from tianji.env import Env
from tianji.errors import Refusal
from tianji.evaluator import Evaluation
from tianji.folder import ARRIVALS, find_run
from tianji.run import prepare_torch
from tianji.spec import make_spec
from tianji.types import Array, Leaves, Params

MOST_FRAMES = 3000
"""frames of a video, at most"""


def arrivals(run: str | Path, group: int = 0) -> Array:
    """Every rollout that reached the buffer of a run, or of one of its groups, in order: ARRIVAL
    records. Only runs whose order is not fixed keep them."""
    folder = find_run(run)
    several = (folder / f"g0.{ARRIVALS}").exists()
    path = folder / (f"g{group}.{ARRIVALS}" if several or group else ARRIVALS)
    return np.fromfile(path, ARRIVAL) if path.exists() else np.empty(0, ARRIVAL)


class Player:
    """A policy that acts greedily, on one observation or on many at once."""

    def __init__(self, policy: Policy, spec: Spec) -> None:
        self._policy = policy
        self._shape = spec.env.observation["obs"].shape
        self._dtype = spec.env.observation["obs"].dtype
        self._recurrent: Leaves = {}

    def act(self, observation: npt.ArrayLike) -> Array:
        """The action for one observation, or the actions for [B, ...] of them."""
        obs = np.asarray(observation, self._dtype)
        single = obs.shape == self._shape
        batch = obs[None] if single else obs
        if batch.shape[1:] != self._shape:
            raise ValueError(
                f"an observation of shape {obs.shape} does not fit: the policy was trained on "
                f"{self._shape}, or [B, ...] of it. Dict and Tuple observations are flattened."
            )
        if not self._recurrent or len(next(iter(self._recurrent.values()))) != len(batch):
            self._recurrent = self._policy.initial(len(batch))
        action, self._recurrent, *_ = self._policy.act({"obs": batch}, self._recurrent, None)
        return action[0] if single else action


class Trained:
    """A run's newest (or another) checkpoint."""

    def __init__(self, run: Path, config: Config, spec: Spec, policy: Policy, version: int) -> None:
        self.run = run
        self.config = config
        self.version = version
        self.policy = Player(policy, spec)
        self._policy = policy

    def evaluate(self, episodes: int = 10, seed: int = 0) -> Array:
        """Play whole episodes greedily; their returns and lengths, EPISODE records."""
        env = self.env(min(episodes, EVAL_ENVS))
        try:
            evaluation = Evaluation(env, self._policy, episodes, seed)
            while (result := evaluation.step()) is None:
                pass
            return result
        finally:
            env.close()

    def env(self, num_envs: int = 1, render: bool = False) -> Env:
        """The environment that the policy was trained in."""
        return self.config.env.make(num_envs, render)

    def frames(self, seed: int = 0) -> tuple[list[Array], float]:
        """The pictures of one greedy episode, and its return."""
        env = self.env(1, render=True)
        # SDL, under pygame, complains where it finds neither screen nor sound.
        before = dict(os.environ)
        os.environ.update(SDL_VIDEODRIVER="dummy", SDL_AUDIODRIVER="dummy")
        try:
            evaluation = Evaluation(env, self._policy, 1, seed)
            pictures = [_picture(env)]
            result = None
            while result is None and len(pictures) < MOST_FRAMES:
                result = evaluation.step()
                pictures.append(_picture(env))
            return pictures, float(result["return"][0]) if result is not None else float("nan")
        finally:
            env.close()
            for name in ("SDL_VIDEODRIVER", "SDL_AUDIODRIVER"):
                os.environ.pop(name)
                if name in before:
                    os.environ[name] = before[name]


def load(run: str | Path, checkpoint: str = "latest") -> Trained:
    """What a run has learnt: "latest", "best", or the name of one of its checkpoints."""
    folder = find_run(run)
    config = load_config(folder / "config.toml", name=folder.name)
    prepare_torch(config)
    checkpoints = Checkpoints(folder / "checkpoints", config.checkpoint.keep, config.identity())
    state: dict[str, Any] = checkpoints.load(checkpoint, only=("policy",)).parts["policy"]
    env = config.env.make(1)
    spec = make_spec(config, env.spec)
    env.close()
    policy = config.algorithm.policy(spec)
    params = Params(config.algorithm.describe(spec).params)
    for name, array in state["params"].items():
        np.copyto(params[name], array)
    policy.load(params)
    return Trained(folder, config, spec, policy, state["version"])


def _picture(env: Env) -> Array:
    picture = env.render()
    if not isinstance(picture, np.ndarray) or picture.ndim != 3 or picture.dtype != np.uint8:
        raise Refusal(
            f"{env.spec.id} cannot be shown: render() gave {type(picture).__name__}, no picture. "
            f"Let it return an array [H, W, 3] of uint8."
        )
    return picture


def write_video(path: Path, frames: list[Array], fps: int = 30) -> None:
    """A GIF or an MP4, by the file's ending."""
    if path.suffix not in (".gif", ".mp4"):
        raise Refusal(f"{path} must end in .gif or .mp4: no other kind of video is written.")
    try:
        import imageio.v3 as imageio
    except ImportError as error:
        raise Refusal(
            "writing a video needs imageio, which is not installed. "
            "Run: pip install 'tianji[video]'"
        ) from error
    try:
        if path.suffix == ".gif":
            imageio.imwrite(path, frames, duration=1000 / fps, loop=0)
            return
        even = [frame[: len(frame) // 2 * 2, : frame.shape[1] // 2 * 2] for frame in frames]
        imageio.imwrite(path, even, fps=fps, codec="libx264", macro_block_size=1)
    except OSError as error:
        raise Refusal(f"{path} cannot be written: {error}. Choose another place.") from error


def _screen() -> bool:
    """Is there something to show a window on?"""
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"))


def show_window(frames: list[Array], fps: int = 30) -> None:
    """Show pictures in a window, until they end or it is closed."""
    if not _screen():
        raise Refusal(
            "there is no screen here to show a window on. Write a file instead: "
            "tianji play RUN --video episode.gif"
        )
    try:
        import pygame
    except ImportError as error:
        raise Refusal(
            "showing a window needs pygame, which is not installed. "
            "Run: pip install 'tianji[video]'"
        ) from error
    pygame.init()
    try:
        height, width = frames[0].shape[:2]
        screen = pygame.display.set_mode((width, height))
        clock = pygame.time.Clock()
        for frame in frames:
            if any(event.type == pygame.QUIT for event in pygame.event.get()):
                break
            surface = pygame.surfarray.make_surface(frame.swapaxes(0, 1))
            screen.blit(surface, (0, 0))
            pygame.display.flip()
            clock.tick(fps)
    finally:
        pygame.quit()
