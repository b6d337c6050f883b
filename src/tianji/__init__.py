"""TianJi: reinforcement learning whose actors, buffer and learners run their own loops."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tianji.algorithm import register_algorithm as register_algorithm
    from tianji.config import load_config as load_config
    from tianji.env import register_env as register_env
    from tianji.errors import Failure as Failure
    from tianji.errors import Refusal as Refusal
    from tianji.result import Result as Result
    from tianji.run import resume as resume
    from tianji.run import train as train
    from tianji.run import warm as warm
    from tianji.trained import arrivals as arrivals
    from tianji.trained import load as load
    from tianji.trigger import register_trigger as register_trigger

__version__ = "0.5.0"

_HOME = {
    "train": "run",
    "resume": "run",
    "warm": "run",
    "Result": "result",
    "load": "trained",
    "arrivals": "trained",
    "load_config": "config",
    "register_env": "env",
    "register_algorithm": "algorithm",
    "register_trigger": "trigger",
    "Refusal": "errors",
    "Failure": "errors",
}

__all__ = [
    "Failure", "Refusal", "Result", "arrivals", "load", "load_config", "register_algorithm",
    "register_env", "register_trigger", "resume", "train", "warm",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    # torch takes a second to import: `tianji --help` must not wait for it.
    if name in _HOME:
        return getattr(importlib.import_module(f"tianji.{_HOME[name]}"), name)
    raise AttributeError(f"module 'tianji' has no attribute {name!r}")
