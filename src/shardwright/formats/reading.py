"""JSON and YAML as plain data: limited in size, depth and what aliases expand to; a key stands once.

Numbers that are none (NaN) are read: it is for a schema to refuse them, with their place.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from ..errors import ShardwrightError

LARGEST_JSON = 16 * 2**20  # bytes; a plan for a thousand layers has some hundred thousand
LARGEST_YAML = 2**19  # bytes; read at half a megabyte a second
MOST_NODES = 100_000  # of a YAML file, with every alias written out
MOST_DEPTH = 64

Kind = type[ShardwrightError]


def read_text(path: str | Path, kind: Kind, largest: int = LARGEST_JSON) -> bytes:
    """The bytes of a file of limited size. A pipe or a device is no file: it may never end."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise kind(f"{path} can't be read: it is not a file")
            content = file.read(min(status.st_size, largest) + 1)
    except (OSError, ValueError) as error:  # a name with a null byte is a ValueError
        raise kind(f"{path} can't be read: {getattr(error, 'strerror', None) or error}") from error
    if len(content) > largest:
        raise kind(f"{path} is too large: it has more than {largest} bytes")
    return content


def read_json(path: str | Path, kind: Kind, largest: int = LARGEST_JSON) -> Any:
    """The data of a JSON file."""
    return parse_json(read_text(path, kind, largest), path, kind)


def parse_json(content: str | bytes, path: str | Path, kind: Kind) -> Any:
    """The data of JSON text. `path` is for messages."""
    try:
        return json.loads(content, object_pairs_hook=_unique)
    except RecursionError as error:
        raise kind(f"{path} is not JSON that can be read: it is nested too deep") from error
    except ValueError as error:
        raise kind(f"{path} is not JSON: {error}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; JSON would keep the last of two equal keys without a word."""
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} is there twice")
    return content


class StrictLoader(yaml.SafeLoader):  # type: ignore[misc]
    """Plain data only, and no key twice: YAML would keep the last without a word."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[Any] = set()
        for key, _ in node.value:
            value = self.construct_object(key, deep=True)
            if isinstance(value, str | int | float) and value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {value!r} is there twice", key.start_mark)
            seen.add(str(value) if isinstance(value, list | dict) else value)
        return super().construct_mapping(node, deep=deep)


def read_yaml(path: str | Path, kind: Kind, loader: type[Any] = StrictLoader) -> Any:
    """The data of a YAML file."""
    return parse_yaml(read_text(path, kind, LARGEST_YAML), path, kind, loader)


def parse_yaml(content: bytes, path: str | Path, kind: Kind, loader: type[Any] = StrictLoader) -> Any:
    """The data of YAML text. `path` is for messages."""
    node = compose_yaml(content, path, kind, loader)
    try:
        return None if node is None else loader("").construct_document(node)
    except RecursionError as error:
        raise kind(f"{path} is not YAML that can be read: it is nested too deep") from error
    except (yaml.YAMLError, ValueError, TypeError, KeyError, OverflowError) as error:  # a date such as 2026-99-99
        raise kind(f"{path} is not YAML: {error}") from error


def compose_yaml(content: bytes, path: str | Path, kind: Kind, loader: type[Any] = StrictLoader) -> Any:
    """The nodes of YAML text with their lines, checked for what their aliases expand to."""
    try:
        node = yaml.compose(content.decode("utf-8"), Loader=loader)
        nodes, depth = (0, 0) if node is None else _expanded(node, {}, path, kind)
    except RecursionError as error:
        raise kind(f"{path} is not YAML that can be read: it is nested too deep") from error
    except (yaml.YAMLError, ValueError) as error:
        raise kind(f"{path} is not YAML: {error}") from error
    if nodes > MOST_NODES or depth > MOST_DEPTH:
        raise kind(
            f"{path} has {min(nodes, 10**18)} values, {depth} levels deep, once its aliases are written out; a file "
            f"may have {MOST_NODES}, {MOST_DEPTH} deep"
        )
    return node


def _expanded(node: Any, known: dict[int, tuple[int, int] | None], path: str | Path, kind: Kind) -> tuple[int, int]:
    """How many nodes a node stands for with every alias written out, and how deep they lie."""
    if id(node) in known:
        size = known[id(node)]
        if size is None:
            raise kind(f"{path} is not YAML that can be read: an alias stands inside of what it names")
        return size
    known[id(node)] = None
    inner = node.value if isinstance(node, yaml.SequenceNode) else []
    if isinstance(node, yaml.MappingNode):
        inner = [part for pair in node.value for part in pair]
    sizes = [_expanded(part, known, path, kind) for part in inner]
    known[id(node)] = total = (
        1 + sum(nodes for nodes, _ in sizes),
        1 + max((depth for _, depth in sizes), default=0),
    )
    return total
