"""The two ways a run ends badly, and nearest names for messages."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable


class Refusal(Exception):
    """Refused before the first step: the message says the consequence and the remedy (exit 2)."""


class Failure(Exception):
    """Failed after the first step: the message says what happened and what was kept (exit 1)."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """' Did you mean "x"?' where some valid name is near, else ''."""
    near = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.6)
    return f' Did you mean "{near[0]}"?' if near else ""


def wrong_with(error: Exception, whole: str) -> str:
    """What is wrong with a file that was to be `whole`, in words."""
    match error:
        case OSError():
            return error.strerror or str(error)
        case json.JSONDecodeError():
            return f"it is no JSON: {error}"
        case KeyError():
            return f'it has no "{error.args[0]}"'
        case ValueError():
            return str(error)
    return f"its parts are not those of {whole}"
