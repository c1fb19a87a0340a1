"""Nested Python values as JSON, with their tensors stored separately.

Numbers, strings, None, lists and dicts with string keys are written as they are. What JSON lacks
becomes {"$": kind, ...}: tuples, other dicts, sets, bytes, numbers such as nan, dtypes, tensors
(by their keys). Anything else is refused: restoring an object of an unknown class would run its
code.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor

from ..errors import CheckpointError, InputError
from ..formats import Faults, Schema, listing, literal, mapping, record, show, text


def encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON; its tensors go to `tensors`. `path` is its position, for keys and errors."""
    if isinstance(value, Tensor):
        return {"$": "tensor", "key": _keep(value, path, tensors)}
    if isinstance(value, numpy.ndarray):
        return {"$": "array", "key": _keep(torch.from_numpy(numpy.array(value)), path, tensors)}
    if isinstance(value, list):
        return [encode(item, f"{path}/{at}", tensors) for at, item in enumerate(value)]
    if isinstance(value, Mapping):
        return _encode_mapping(value, path, tensors)
    if isinstance(value, tuple | set | frozenset):
        kind = "tuple" if isinstance(value, tuple) else type(value).__name__
        return {"$": kind, "items": [encode(item, f"{path}/{at}", tensors) for at, item in enumerate(value)]}
    return _encode_single(value, path)


def _encode_single(value: Any, path: str) -> Any:
    if isinstance(value, numpy.generic) and not isinstance(value, float):
        return {"$": "scalar", "dtype": value.dtype.name, "value": _encode_single(value.item(), path)}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$": "float", "value": repr(float(value))}
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, bytes | bytearray):
        return {"$": "bytes", "base64": base64.b64encode(value).decode()}
    if isinstance(value, complex):
        return {"$": "complex", "parts": [_encode_single(value.real, path), _encode_single(value.imag, path)]}
    if isinstance(value, torch.dtype):
        return {"$": "dtype", "name": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"$": "device", "name": str(value)}
    raise InputError(
        f"{path} is a {type(value).__name__}, which a checkpoint can't store: only numbers, strings, lists, dicts and "
        "tensors load without running code; pass its state_dict() instead"
    )


def _encode_mapping(value: Mapping[Any, Any], path: str, tensors: dict[str, Tensor]) -> Any:
    if type(value) is not Counter and all(isinstance(key, str) and key != "$" for key in value):
        return {key: encode(item, f"{path}/{key}", tensors) for key, item in value.items()}
    items = [[encode(key, path, tensors), encode(item, f"{path}/{key}", tensors)] for key, item in value.items()]
    return {"$": "counter" if type(value) is Counter else "dict", "items": items}


def _keep(tensor: Tensor, path: str, tensors: dict[str, Tensor]) -> str:
    key, number = path, 1
    while key in tensors:
        number += 1
        key = f"{path}#{number}"
    tensors[key] = tensor
    return key


def keys_of(value: Any) -> list[str]:
    """The keys of the tensors in an encoded value."""
    if isinstance(value, list):
        return [key for item in value for key in keys_of(item)]
    if not isinstance(value, dict):
        return []
    if value.get("$") in ("tensor", "array"):
        return [value["key"]]
    return [key for item in value.values() for key in keys_of(item)]


def decode(encoded: Any, tensor: Callable[[str], Tensor]) -> Any:
    """Decode a value that `encoded` has no fault of; `tensor` looks a tensor up by its key."""
    if isinstance(encoded, list):
        return [decode(item, tensor) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    kind = encoded.get("$")
    if kind is None:
        return {key: decode(item, tensor) for key, item in encoded.items()}
    try:
        return _decode_kind(kind, encoded, tensor)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:  # an unknown device, a list as key
        raise CheckpointError(f"a checkpoint has a {kind} that can't be read: {error}") from error


def _decode_kind(kind: str, encoded: Mapping[str, Any], tensor: Callable[[str], Tensor]) -> Any:
    if kind in ("tensor", "array"):
        stored = tensor(encoded["key"])
        return stored if kind == "tensor" else stored.numpy()
    if kind in ("dict", "counter"):
        pairs = {decode(key, tensor): decode(item, tensor) for key, item in encoded["items"]}
        return pairs if kind == "dict" else Counter(pairs)
    if kind in _SINGLE:
        return _SINGLE[kind](encoded)
    if kind in _SEVERAL:
        return _SEVERAL[kind](decode(item, tensor) for item in encoded["items"])
    raise CheckpointError(f"a checkpoint has a value of kind {kind!r}, unknown to this version")


def _dtype(encoded: Mapping[str, Any]) -> torch.dtype:
    dtype = getattr(torch, encoded["name"], None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{encoded['name']!r} is not a dtype")
    return dtype


def _scalar(encoded: Mapping[str, Any]) -> Any:
    """A numpy scalar: a number or text, since `numpy.void(n)` and `numpy.bytes_(n)` allocate n bytes."""
    dtype, value = numpy.dtype(encoded["dtype"]), decode(encoded["value"], _no_tensor)
    allowed = {"b": bool, "i": int, "u": int, "f": int | float, "c": int | float | complex, "U": str, "S": bytes}
    if not isinstance(value, allowed.get(dtype.kind, ())):
        raise ValueError(f"{encoded['dtype']!r} of a {type(value).__name__}")
    return dtype.type(value)


_SEVERAL: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_SINGLE: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "float": lambda encoded: float(encoded["value"]),
    "bytes": lambda encoded: base64.b64decode(encoded["base64"], validate=True),
    "complex": lambda encoded: complex(*(decode(part, _no_tensor) for part in encoded["parts"])),
    "device": lambda encoded: torch.device(encoded["name"]),
    "dtype": _dtype,
    "scalar": _scalar,
}


def _no_tensor(key: str) -> Tensor:
    raise CheckpointError(f"there is a tensor ({key}) where a number should be")


# -- what an encoded value should be ---------------------------------------------------------------

DEEPEST = 100


def encoded(value: Any, left: int = DEEPEST) -> Faults:
    """The faults of an encoded value: a schema, for values of any structure."""
    if not left:
        return [((), f"is nested more than {DEEPEST} deep")]

    def inner(part: Any) -> Faults:
        return encoded(part, left - 1)

    if type(value) is list:
        return _ITEMS(value) or listing(inner)(value)
    if type(value) is not dict:
        return ()
    if "$" not in value:
        return mapping(inner)(value)
    kind = value["$"]
    if type(kind) is not str or kind not in _FIELDS:
        return [((), f"has the unknown kind {show(kind)}")]
    faults = list(record({"$": literal(kind), **_FIELDS[kind]})(value))
    return faults or [((key, *route), message) for key in _INNER[kind] for route, message in inner(value[key])]


_ITEMS = listing(lambda part: ())
_PAIRS = listing(listing(lambda part: (), least=2, most=2))
_SHORT = text(longest=200)
_FIELDS: dict[str, dict[str, Schema]] = {
    "tensor": {"key": text()},
    "array": {"key": text()},
    "dict": {"items": _PAIRS},
    "counter": {"items": _PAIRS},
    **{kind: {"items": _ITEMS} for kind in _SEVERAL},
    "float": {"value": literal("nan", "inf", "-inf")},
    "bytes": {"base64": text(longest=2**30)},
    "complex": {"parts": listing(lambda part: (), least=2, most=2)},
    "device": {"name": _SHORT},
    "dtype": {"name": _SHORT},
    "scalar": {"dtype": _SHORT, "value": lambda part: ()},
}
_INNER = {kind: [key for key in fields if key in ("items", "parts", "value") and kind != "float"]
          for kind, fields in _FIELDS.items()}  # fmt: skip
