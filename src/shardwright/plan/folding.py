"""Names in a plan file: written once with a star for all layers, by module where a stage has all ops of one.

"blocks.*.attn.qkv / linear"    the op of every block
"blocks.0-5"                    all ops of six modules
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..errors import PlanError, raise_all
from ..ir.paths import prefixes
from ..storage import Storage

_NUMBER = re.compile(r"(?<![\w*])\d+(?=[./@ ]|$)")


def star(name: str) -> str:
    """A name with stars for layer numbers; the number of an op in its module stays."""
    path, slash, kind = name.partition(" / ")
    return _NUMBER.sub("*", path) + slash + kind


def fold(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Names that differ only in layer numbers and have the same entry, written once with a star."""
    stars: dict[str, set[str]] = {}
    for name, value in entries.items():
        stars.setdefault(star(name), set()).add(json.dumps(_plain(value), sort_keys=True))
    return {star(name) if len(stars[star(name)]) == 1 else name: value for name, value in entries.items()}


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value.written() if isinstance(value, Storage) else value


def unfold(entries: Mapping[str, Any], names: Sequence[str], where: str = "the model") -> dict[str, Any]:
    """The reverse of `fold`, for the names that there are."""
    unfolded: dict[str, Any] = {}
    used: set[str] = set()
    for name in names:
        for key in (name, star(name)):
            if key in entries:
                unfolded[name] = entries[key]
                used.add(key)
                break
    unknown = [f"{key!r} names nothing in {where}" for key in entries if key not in used]
    raise_all(PlanError, "the plan does not fit the model:", unknown)
    return unfolded


def unfold_paths(folded: list[str], paths: list[str], where: str = "the model") -> tuple[str, ...]:
    """The modules that folded entries name, of the modules that there are."""
    return tuple(unfold(dict.fromkeys(folded, True), paths, where))


_CALL = re.compile(r"@\d+")
_RANGE = re.compile(r"(.*?)(\d{1,9})-(\d{1,9})")
_LONGEST_RANGE = 100_000  # of the modules of a list


def module_of(name: str) -> str:
    """The module that an op is in, by its name; "" for the model's own."""
    return "" if name.startswith("/ ") else _CALL.sub("", name.partition(" / ")[0])


def cover(own: Iterable[str], others: Iterable[str]) -> list[str]:
    """Ops as a list of modules that have no other ops, runs of numbered ones as one, and single ops."""
    shared = {path for name in others for path in ("", *prefixes(module_of(name)))}
    covering: dict[str, None] = {}
    for name in own:
        module = next((path for path in prefixes(module_of(name)) if path not in shared), None)
        covering.setdefault(name if module is None else module)
    return _in_runs(list(covering))


def _in_runs(items: Sequence[str]) -> list[str]:
    """Neighbours "blocks.3", "blocks.4" as "blocks.3-4"."""
    runs: list[tuple[str, int | None, int | None]] = []
    for item in items:
        head, _, last = item.rpartition(".")
        if "/ " in item or not last.isdigit() or str(int(last)) != last:
            runs.append((item, None, None))
        elif runs and runs[-1][0] == head and runs[-1][2] == int(last) - 1:
            runs[-1] = (head, runs[-1][1], int(last))
        else:
            runs.append((head, int(last), int(last)))
    return [
        head if first is None else f"{head}.{first}".lstrip(".") + (f"-{last}" if last != first else "")
        for head, first, last in runs
    ]


def uncover(covering: Sequence[str], names: Sequence[str]) -> list[str]:
    """The reverse of `cover`, for the names that there are."""
    under: dict[str, list[str]] = {}
    for name in names:
        for path in (name, *prefixes(module_of(name))):
            under.setdefault(path, []).append(name)
    covered: dict[str, None] = {}
    unknown: list[str] = []
    for item in covering:
        run = None if item in under else _RANGE.fullmatch(item)
        if run is not None and int(run[3]) - int(run[2]) > _LONGEST_RANGE:
            run = None
        paths = [item] if run is None else [f"{run[1]}{number}" for number in range(int(run[2]), int(run[3]) + 1)]
        unknown += [f"{path!r} names nothing in the model" for path in paths if path not in under]
        covered |= dict.fromkeys(name for path in paths for name in under.get(path, ()))
    raise_all(PlanError, "the plan does not fit the model:", unknown)
    return [name for name in names if name in covered]
