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
from typing import Any, ClassVar, TypeVar

import numpy as np

from tianji.state import describe_dtype, dtype_of

T = TypeVar("T")
Range = tuple[float, float]

COUNT: Range = (1, 10**15)
"""of anything, where nothing else is said"""
LARGEST = 10**300
"""that is a float"""


class Codec:
    """Reads what `tree` wrote: dataclasses of which each field is there and nothing else is, and
    what those are made of; states are taken as they are. What is otherwise in other files, and how
    it is said there that something is wrong, is in classes of their own."""

    null: ClassVar[bool] = True
    """is there a word for None?"""
    item: ClassVar[str] = "{}.{}"
    """how the key of one in a list is written"""

    def read(self, kind: Any, value: Any, key: str = "", within: tuple[Any, ...] = ()) -> Any:
        """The value as the annotation wants it, numbers within these bounds; else `wrong`."""
        origin, parts = typing.get_origin(kind) or kind, typing.get_args(kind)
        if origin is typing.Annotated:
            return self.read(parts[0], value, key, parts[1:])
        if origin in (typing.Union, types.UnionType):
            none = value is None and self.null
            return None if none else self.read(self._meant(kind, value, key), value, key)
        if dataclasses.is_dataclass(kind):
            return self._fields(kind, value, key)
        if origin in (Mapping, dict):
            return self._entries(kind, value, key)
        if origin is tuple:
            return self._items(kind, value, key)
        if kind in (int, float):
            return self._number(kind, value, key, within)
        if origin is np.dtype:
            return dtype_of(value)
        if kind is Any:
            return value
        if not (value in parts if origin is typing.Literal else isinstance(value, origin)):
            raise self.wrong(kind, value, key)
        return value

    def wrong(self, kind: Any, value: Any, key: str) -> Exception:
        origin, parts = typing.get_origin(kind) or kind, typing.get_args(kind)
        words = {
            bool: "not true or false",
            str: "not a text",
            np.ndarray: "no array",
            tuple: "no list" + f" of {len(parts)}" * (Ellipsis not in parts),
            typing.Literal: f"not {' or '.join(map(str, parts))}",
            types.UnionType: f"none of {', '.join(getattr(k, '__name__', str(k)) for k in parts)}",
        }
        return ValueError(f"{key or 'it'} is {short(value)}, {words.get(origin, 'no table')}")

    def _meant(self, kind: Any, value: Any, key: str) -> Any:
        """The one of several types that a value is of: of dataclasses, the one with its fields."""
        options = [option for option in typing.get_args(kind) if option is not types.NoneType]
        for option in options:
            if dataclasses.is_dataclass(option):
                fits = isinstance(value, Mapping) and set(value) == set(_hints(option))  # type: ignore[arg-type]
            else:
                fits = len(options) == 1 or isinstance(value, typing.get_origin(option) or option)
            if fits:
                return option
        raise self.wrong(kind, value, key)

    def _fields(self, kind: Any, value: Any, key: str) -> Any:
        found, hints = table(value, key), _hints(kind)
        keys = {name: f"{key}.{name}" if key else name for name in (*hints, *found)}
        for name in hints:
            expect(name in found, f'it has no "{keys[name]}"')
        for name in found:
            expect(name in hints, f'"{short(keys[name])[1:-1]}" is unknown here')
        return kind(**{name: self.read(hints[name], found[name], keys[name]) for name in hints})

    def _entries(self, kind: Any, value: Any, key: str, within: tuple[Any, ...] = ()) -> Any:
        if not isinstance(value, Mapping):
            raise self.wrong(kind, value, key)
        named, inner = typing.get_args(kind)
        return {
            name if named is str else _count(name, key): self.read(
                inner, part, f"{key}.{name}", within
            )
            for name, part in value.items()
        }

    def _items(self, kind: Any, value: Any, key: str) -> Any:
        parts = typing.get_args(kind)
        if isinstance(value, list | tuple) and parts[-1] is Ellipsis:
            parts = (parts[0],) * len(value)
        if not isinstance(value, list | tuple) or len(value) != len(parts):
            raise self.wrong(kind, value, key)
        every = enumerate(zip(parts, value, strict=True))
        return tuple(self.read(part, v, self.item.format(key, i)) for i, (part, v) in every)

    def _number(self, kind: Any, value: Any, key: str, within: tuple[Any, ...]) -> Any:
        right = type(value) is int or (kind is float and type(value) is float)
        too_large = type(value) is int and kind is float and abs(value) > LARGEST
        ranges = "".join(f" from {low:g} to {high:g}" for low, high in within)
        expect(right and not too_large and all(low <= value <= high for low, high in within),
               f"{key} is {short(value)}, no {'whole ' * (kind is int)}number{ranges}")  # fmt: skip
        return kind(value)


@dataclasses.dataclass(frozen=True)
class Reader(Codec):
    """Reads what was measured, each number in its range. Fields are known by their keys, such as
    `rates.act`."""

    ranges: Mapping[str, Range] = dataclasses.field(default_factory=dict)
    """of the numbers of a key, and of all in a table"""
    number: Range = (-math.inf, math.inf)
    """of all others that need not be whole"""
    entry: Range = (-math.inf, math.inf)
    """of those in tables"""
    may_be_empty: Set[str] = frozenset()
    """tables that may"""

    def read(self, kind: Any, value: Any, key: str = "", within: tuple[Any, ...] = ()) -> Any:
        expect(kind is not Any or type(value) in (str, int, types.NoneType),
               f"{key} is {short(value)}, not a text, a whole number or null")  # fmt: skip
        return super().read(kind, value, key, within)

    def _entries(self, kind: Any, value: Any, key: str, within: tuple[Any, ...] = ()) -> Any:
        expect(value != {} or key in self.may_be_empty, f"{key} is empty")
        return super()._entries(kind, value, key, (self.ranges.get(key, self.entry),))

    def _number(self, kind: Any, value: Any, key: str, within: tuple[Any, ...]) -> Any:
        own = self.ranges.get(key, COUNT if kind is int else self.number)
        within = within or (own,)
        if value == "inf" and math.isinf(within[0][1]):  # JSON has no infinity
            value = math.inf
        return super()._number(kind, value, key, within)


def read(kind: type[T], value: Any) -> T:
    """A dataclass from its `tree`; ValueError where it is something else."""
    found: T = Codec().read(kind, value)
    return found


def tree(value: Any) -> Any:
    """A dataclass as tables and lists; arrays stay what they are."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        hints = _hints(type(value)).items()
        shown = {name: (hint, getattr(value, name)) for name, hint in hints}
        return {name: part if _free(hint) else tree(part) for name, (hint, part) in shown.items()}
    if isinstance(value, Mapping):
        return {str(name): tree(part) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return [tree(part) for part in value]
    return describe_dtype(value, "a dtype") if isinstance(value, np.dtype) else value


@functools.cache
def _free(hint: Any) -> bool:
    """Is it a state, which is judged where it is encoded?"""
    if (typing.get_origin(hint) or hint) is np.dtype:
        return False
    return hint is Any or any(map(_free, typing.get_args(hint)))


@functools.cache
def _hints(kind: Any) -> Mapping[str, Any]:
    """What is read of a dataclass: fields that are not compared belong to one process."""
    hints = typing.get_type_hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind) if f.compare}


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
