"""A role's state as JSON and arrays: exact, and nothing in it can execute."""

from __future__ import annotations

import json
import math
import struct
from typing import Any
from urllib.parse import quote

import numpy as np

from tianji.types import Leaves

NATIVE = {"|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8"}
"""What safetensors stores as it is; other arrays are stored as bytes, their dtype in the JSON."""


def encode(value: Any, part: str, path: str, arrays: Leaves | None) -> Any:
    """The value as plain JSON; arrays go into `arrays`, under their paths, where there may be any.

    What JSON lacks becomes {"$": kind, ...}. Keys are quoted in paths, so that no two are the same.
    """
    if value is None or type(value) in (bool, str):
        return value
    if type(value) is int:  # other readers of JSON lose digits, Python limits them
        return value if abs(value) < 2**63 else {"$": "int", "hex": hex(value)}
    if type(value) is float:
        return (
            value
            if math.isfinite(value)
            else {"$": "float", "bits": struct.pack(">d", value).hex()}
        )
    if type(value) is list:
        return [encode(v, part, f"{path}/{i}", arrays) for i, v in enumerate(value)]
    if isinstance(value, dict):
        items: dict[str, Any] = {}
        for key, inner in value.items():
            if type(key) is not str:
                raise TypeError(f"{part}{path}: the key {key!r} is not a string")
            below = f"{path}/{quote(key, safe='', errors='surrogatepass')}"
            items[key] = encode(inner, part, below, arrays)
        return {"$": "dict", "items": [*items.items()]} if "$" in items else items
    if arrays is not None and (type(value) is np.ndarray or isinstance(value, np.memmap)):
        arrays[path] = value
        if value.dtype.str in NATIVE:
            return {"$": "array", "name": path}
        description = describe_dtype(value.dtype, part + path)
        return {"$": "array", "name": path, "dtype": description, "shape": [*value.shape]}
    raise TypeError(
        f"{part}{path}: a {type(value).__name__} cannot be saved and loaded as the same thing. "
        "A state holds None, bool, int, float, str, lists and dicts of them"
        + (", and numpy arrays." if arrays is not None else ".")
    )


def decode(value: Any, arrays: Leaves) -> Any:
    if isinstance(value, list):
        return [decode(v, arrays) for v in value]
    if not isinstance(value, dict):
        return value
    match value.get("$"):
        case None:
            return {k: decode(v, arrays) for k, v in value.items()}
        case "dict":
            return {k: decode(v, arrays) for k, v in value["items"]}
        case "int":
            return int(value["hex"], 16)
        case "float":
            return struct.unpack(">d", bytes.fromhex(value["bits"]))[0]
        case "array" if "dtype" not in value:
            return arrays[value["name"]]
        case "array":
            return arrays[value["name"]].view(dtype_of(value["dtype"])).reshape(value["shape"])
    raise ValueError(f"{value['$']!r} is no kind of value")


def describe_dtype(dtype: np.dtype[Any], where: str) -> Any:
    """A dtype as JSON can have it."""
    if not dtype.hasobject and dtype.itemsize:
        description = json.loads(json.dumps(np.lib.format.dtype_to_descr(dtype)))
        if dtype_of(description) == dtype:
            return description
    raise TypeError(f"{where}: an array of dtype {dtype} cannot be saved and loaded as the same")


def dtype_of(description: Any) -> np.dtype[Any]:
    """The dtype that was described."""
    return np.lib.format.descr_to_dtype(_tuples(description))


def _tuples(description: Any) -> Any:
    """JSON made lists of the tuples in numpy's description of a dtype: a list of fields."""
    if isinstance(description, str):
        return description
    fields = []
    for name, inner, *shape in description:
        title = tuple(name) if isinstance(name, list) else name
        fields.append((title, _tuples(inner), *map(tuple, shape)))
    return fields


def dump(content: Any) -> bytes:
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, indent=1)
    return text.encode("utf-8", "surrogatepass")


def parse(raw: bytes) -> Any:
    return json.loads(raw.decode("utf-8", "surrogatepass"))
