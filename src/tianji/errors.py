"""The two ways a run ends badly, and nearest names for messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class Refusal(Exception):
    """Refused before the first step: the message says the consequence and the remedy (exit 2)."""


class Failure(Exception):
    """Failed after the first step: the message says what happened and what was kept (exit 1)."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """' Did you mean "x"?' where some valid name is near, else ''."""
    near = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.6)
    return f' Did you mean "{near[0]}"?' if near else ""
