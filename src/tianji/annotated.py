"""Reads what JSON has as dataclasses, by their annotations, and says which part is wrong; and
writes dataclasses so that they can be read again."""

from __future__ import annotations

import dataclasses
import functools
import math
import reprlib
import types
import typing
from collections.abc import Mapping, Set
from typing import Any, TypeVar

import numpy as np

from tianji.state import describe_dtype, dtype_of

T = TypeVar("T")
Range = tuple[float, float]

COUNT: Range = (1, 10**15)
"""of anything, where nothing else is said"""
LARGEST = 10**300
"""that is a float"""


@dataclasses.dataclass(frozen=True)
class Reader:
    """Fields are known by their keys, such as `rates.act`."""

    ranges: Mapping[str, Range] = dataclasses.field(default_factory=dict)
    """of the numbers of a key, and of all in a table"""
    number: Range = (-math.inf, math.inf)
    """of all others that need not be whole"""
    entry: Range = (-math.inf, math.inf)
    """of those in tables"""
    may_be_empty: Set[str] = frozenset()
    """tables that may"""

    def read(self, kind: Any, value: Any, key: str = "") -> Any:
        """ValueError where it is something else than the annotation wants: a dataclass of which
        each field is there and nothing else is, or what those are made of."""
        return self._read(kind, value, key, None)

    def _read(self, kind: Any, value: Any, key: str, within: Range | None) -> Any:
        origin, parts = typing.get_origin(kind) or kind, typing.get_args(kind)
        if origin is types.UnionType:  # with None
            return None if value is None else self._read(parts[0], value, key, within)
        if dataclasses.is_dataclass(kind):
            return self._fields(kind, table(value, key), key)
        if origin in (Mapping, dict):
            return self._entries(parts, table(value, key), key)
        if origin is tuple:
            expect(type(value) is list, f"{key} is {short(value)}, no list")
            return tuple(self._read(parts[0], item, f"{key}.{i}", within)
                         for i, item in enumerate(value))  # fmt: skip
        if origin is typing.Literal:
            expect(value in parts, f"{key} is {short(value)}, not {' or '.join(parts)}")
            return value
        if kind in (int, float):
            return self._number(kind, value, key, within)
        known = {bool: "true or false", str: "a text", Any: "a text, a whole number or null"}
        allowed = (str, int, types.NoneType) if kind is Any else (kind,)
        expect(type(value) in allowed, f"{key} is {short(value)}, not {known[kind]}")
        return value

    def _fields(self, kind: Any, found: Mapping[str, Any], key: str) -> Any:
        hints = _hints(kind)
        keys = {name: f"{key}.{name}" if key else name for name in (*hints, *found)}
        for name in hints:
            expect(name in found, f'it has no "{keys[name]}"')
        for name in found:
            expect(name in hints, f'"{short(keys[name])[1:-1]}" is unknown here')
        return kind(
            **{name: self._read(hints[name], found[name], keys[name], None) for name in hints}
        )

    def _entries(self, parts: tuple[Any, ...], found: Mapping[str, Any], key: str) -> Any:
        expect(bool(found) or key in self.may_be_empty, f"{key} is empty")
        within = self.ranges.get(key, self.entry)
        return {
            name if parts[0] is str else _count(name, key): self._read(
                parts[1], item, f"{key}.{name}", within
            )
            for name, item in found.items()
        }

    def _number(self, kind: Any, value: Any, key: str, within: Range | None) -> Any:
        low, high = within or self.ranges.get(key, COUNT if kind is int else self.number)
        if value == "inf" and math.isinf(high):  # JSON has no infinity
            value = math.inf
        right = type(value) is int or (kind is float and type(value) is float)
        too_large = type(value) is int and abs(value) > LARGEST
        expect(right and not too_large and low <= value <= high,
               f"{key} is {short(value)}, no {'whole ' * (kind is int)}number from {low:g} to "
               f"{high:g}")  # fmt: skip
        return kind(value)


class Codec(Reader):
    """Reads what `tree` wrote. It also knows arrays, dtypes, empty tables, any number, tuples of
    different things, dataclasses one of which is meant, and states, which it takes as they are."""

    def _read(self, kind: Any, value: Any, key: str, within: Range | None) -> Any:
        origin, parts = typing.get_origin(kind) or kind, typing.get_args(kind)
        if origin is types.UnionType and value is not None:
            return self._read(_meant(parts, value, key), value, key, within)
        if kind is Any:
            return value
        if origin is np.ndarray:
            expect(isinstance(value, np.ndarray), f"{key} is {short(value)}, no array")
            return value
        if origin is np.dtype:
            return dtype_of(value)
        if origin is tuple and parts[1] is not Ellipsis:
            fits = type(value) is list and len(value) == len(parts)
            expect(fits, f"{key} is {short(value)}, no list of {len(parts)}")
            every = zip(parts, value, strict=True)
            return tuple(
                self._read(part, v, f"{key}.{i}", None) for i, (part, v) in enumerate(every)
            )
        return super()._read(kind, value, key, within)

    def _entries(self, parts: tuple[Any, ...], found: Mapping[str, Any], key: str) -> Any:
        return {name: self._read(parts[1], v, f"{key}.{name}", None) for name, v in found.items()}

    def _number(self, kind: Any, value: Any, key: str, within: Range | None) -> Any:
        right = type(value) is int or (kind is float and type(value) is float)
        expect(right, f"{key} is {short(value)}, no {'whole ' * (kind is int)}number")
        return kind(value)


def read(kind: type[T], value: Any) -> T:
    """A dataclass from its `tree`; ValueError where it is something else."""
    found: T = Codec().read(kind, value)
    return found


def tree(value: Any) -> Any:
    """A dataclass as tables and lists; arrays stay what they are."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        shown = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.compare}
        return {name: tree(part) for name, part in shown.items()}
    if isinstance(value, Mapping):
        return {name: tree(part) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return [tree(part) for part in value]
    return describe_dtype(value, "a dtype") if isinstance(value, np.dtype) else value


@functools.cache
def _hints(kind: Any) -> Mapping[str, Any]:
    """What is read of a dataclass: fields that are not compared belong to one process."""
    own = {f.name for f in dataclasses.fields(kind) if f.compare}
    return {name: hint for name, hint in typing.get_type_hints(kind).items() if name in own}


def _meant(options: tuple[Any, ...], value: Any, key: str) -> Any:
    """The one of several types that a value is of: of dataclasses, the one with its fields."""
    for kind in options:
        if dataclasses.is_dataclass(kind):
            if isinstance(value, Mapping) and set(value) == set(_hints(kind)):  # type: ignore[arg-type]
                return kind
        elif kind is not types.NoneType:
            return kind
    raise ValueError(f"{key} is {short(value)}, none of {', '.join(k.__name__ for k in options)}")


def _count(name: str, key: str) -> int:
    """JSON has texts only as names."""
    low, high = COUNT
    count = int(name) if name.isdecimal() and len(name) < 20 else 0
    expect(low <= count <= high and str(count) == name,
           f"{key} has {short(name)}, no whole number from {low} to {high:g}")  # fmt: skip
    return count


def table(value: Any, key: str = "") -> Mapping[str, Any]:
    expect(isinstance(value, Mapping), f"{key or 'it'} is {short(value)}, no table")
    found: Mapping[str, Any] = value
    return found


def short(value: Any) -> str:
    """What a file has, however long it is."""
    return reprlib.repr(value)


def expect(so: bool, what: str) -> None:
    if not so:
        raise ValueError(what)
