"""Config files of runs: what is wrong in them, with the line, and what was probably meant.

`shardwright train` reads them by jsonargparse, with `class_path` and `init_args`. It knows the keys and the types, but
not where they stand. Here a file is read (by YAML's safe loader) with the line of every key; misspelt keys and classes
that can't be imported are found all at once, and what jsonargparse says of the rest is put at its line.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from ..errors import InputError, meant, raise_all
from ..formats import compose_yaml, parse_yaml, read_text

Keys = Mapping[str, "Keys | None"]
"""The keys that a config may have; None below one whose keys are not known here."""

Route = tuple[str | int, ...]
CLASS, ARGS = "class_path", "init_args"


@dataclass(frozen=True, kw_only=True)
class Config:
    """A file as it was read: its values, and the lines on which its keys stand."""

    path: Path
    values: dict[str, Any]
    lines: dict[Route, int] = field(default_factory=dict)
    twice: tuple[Route, ...] = ()

    def at(self, route: Route) -> str:
        """Where a key stands: the line of it, or of the nearest key above."""
        for length in range(len(route), 0, -1):
            if route[:length] in self.lines:
                return f"{self.path}:{self.lines[route[:length]]}"
        return str(self.path)


def read_config(path: Path) -> Config:
    """Read a file of settings."""
    content = read_text(path, InputError)
    node = compose_yaml(content, path, InputError, yaml.SafeLoader)
    values = parse_yaml(content, path, InputError, yaml.SafeLoader)  # keys that stand twice are named with their lines
    if not isinstance(values, dict):
        raise InputError(f"{path} has no settings: it holds a {type(values).__name__}, and must be keys with values")
    lines: dict[Route, int] = {}
    twice: list[Route] = []
    for route, line in _places(node, ()):
        twice += [route] if route in lines else []
        lines[route] = line
    return Config(path=path, values=values, lines=lines, twice=tuple(twice))


def _places(node: Any, route: Route) -> Iterator[tuple[Route, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = (*route, key.value)
            yield inner, key.start_mark.line + 1
            yield from _places(value, inner)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            inner = (*route, number)
            yield inner, value.start_mark.line + 1
            yield from _places(value, inner)


# -- what is wrong in it ---------------------------------------------------------------------------


def check_config(config: Config, known: Keys, moved: Mapping[str, str]) -> None:
    """Refuse a file with keys that nobody knows, keys that stand twice, and classes that can't be imported.

    `moved` are the keys that used to stand at the top, with their new places.
    """
    faults = [f"{config.at(route)}: {dotted_key(route)} stands twice" for route in config.twice]
    faults += _unknown(config, config.values, known, moved)
    faults += _classes(config, config.values, ())
    raise_all(InputError, f"{config.path} can't be run:", faults)


def _unknown(
    config: Config, values: Mapping[str, Any], known: Keys, moved: Mapping[str, str], route: Route = ()
) -> list[str]:
    faults = []
    for key, value in values.items():
        inner = (*route, key)
        below = known.get(key)
        if key in moved:
            faults.append(f"{config.at(inner)}: {key} is now {moved[key]}")
        elif key not in known:
            faults.append(f"{config.at(inner)}: there is no setting {dotted_key(inner)}{meant(str(key), known)}")
        elif below is not None and isinstance(value, dict) and CLASS not in value:
            faults += _unknown(config, value, below, {}, inner)
    return faults


def _classes(config: Config, value: Any, route: Route) -> list[str]:
    """Faults of everything that names a class."""
    if isinstance(value, list):
        return [fault for number, item in enumerate(value) for fault in _classes(config, item, (*route, number))]
    if not isinstance(value, dict):
        return []
    faults = []
    if isinstance(value.get(CLASS), str) and "." in value[CLASS]:
        faults += _class_faults(config, value, route)
    for key, item in value.items():
        faults += _classes(config, item, (*route, key))
    return faults


def _class_faults(config: Config, value: Mapping[str, Any], route: Route) -> list[str]:
    faults = [
        f"{config.at((*route, key))}: beside {CLASS} stands {key!r}{meant(str(key), [CLASS, ARGS])}"
        for key in value
        if key not in (CLASS, ARGS, "dict_kwargs")
    ]
    try:
        target = find(value[CLASS])
    except InputError as error:
        return [*faults, f"{config.at((*route, CLASS))}: {dotted_key((*route, CLASS))}: {error}"]
    init_args, known = value.get(ARGS) or {}, arguments_of(target)
    if isinstance(init_args, dict) and known is not None:
        for key in init_args:
            if key not in known:
                where = (*route, ARGS, key)
                faults.append(f"{config.at(where)}: {value[CLASS]} takes no {key!r}{meant(str(key), known)}")
    return faults


def find(path: str) -> Any:
    """What a dotted path names, or an error that says which part of it is wrong, and what was meant."""
    module_name, _, name = path.rpartition(".")
    module: Any = None
    rest: list[str] = [name]
    while module_name:
        try:
            module = importlib.import_module(module_name)
            break
        except ModuleNotFoundError as error:
            missing = str(error.name or "")
            if missing != module_name and not module_name.startswith(missing + "."):
                raise InputError(f"{path!r} can't be imported: {error}") from error
            module_name, _, last = module_name.rpartition(".")
            rest.insert(0, last)
        except Exception as error:
            raise InputError(f"{path!r} can't be imported: {type(error).__name__}: {error}") from error
    if module is None:
        raise InputError(f"{path!r} can't be imported: there is no module {rest[0]!r}{meant(rest[0], _modules())}")
    target, walked = module, module_name
    for part in rest:
        if not hasattr(target, part):
            names = [attribute for attribute in dir(target) if not attribute.startswith("_")]
            raise InputError(f"{path!r} can't be imported: {walked!r} has no {part!r}{meant(part, names)}")
        target, walked = getattr(target, part), f"{walked}.{part}"
    return target


def _modules() -> list[str]:
    return [module.name for module in pkgutil.iter_modules()]


def arguments_of(target: Any) -> list[str] | None:
    """The names that a class or a function takes; None if it takes any."""
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [parameter.name for parameter in parameters]


# -- words -----------------------------------------------------------------------------------------


def dotted_key(route: Route) -> str:
    """A key with those above it."""
    return ".".join(map(str, route))


_KEY = re.compile(r"(?:Parser key|Group) [\"']([^\"']+)[\"']")
_REFUSED = re.compile(r"[Oo]ption ['\"]([^'\"]+)['\"]")
_STRANGE = re.compile(r"unrecognized arguments: (.+)")
_MISSING = re.compile(r"arguments are required: (.+)")
_CLASS = re.compile(r"class_path[= ]'([\w.]+)'")
_EXPECTED = re.compile(r"Expected an? (?:<class '([^']+)'>|typing\.(Literal\[[^\n\]]+\]))")
_GOT = re.compile(r"(?:Got|Given) value: (.+)")


def check_overrides(overrides: Sequence[str], moved: Mapping[str, str]) -> None:
    """Refuse settings on the command line that have moved, with their new places."""
    words = [word.partition("=")[0].removeprefix("--") for word in overrides if word.startswith("--")]
    faults = []
    for word in words:
        key, dot, rest = word.rstrip("+").partition(".")
        if key in moved:
            faults.append(f"--{word} is now --{moved[key]}{dot}{rest}")
    raise_all(InputError, "on the command line:", faults)


def explained(message: str, configs: Sequence[Config], known: Keys, overrides: Sequence[str] = ()) -> str:
    """What jsonargparse says is wrong, with the line where it stands, and the nearest that is known.

    `overrides` are the settings on the command line, beside files.
    """
    strange, missing = _STRANGE.search(message), _MISSING.search(message)
    if strange:
        words = [word.partition("=")[0].removeprefix("--") for word in strange[1].split() if word.startswith("--")]
        return "\n".join(f"there is no setting --{word}{meant(word, _flat(known))}" for word in words) or message
    if missing:
        return f"these settings are missing: {missing[1]}"
    route: Route = tuple(part for key in _KEY.findall(message) for part in key.split("."))
    refused = _REFUSED.search(message)
    if refused:
        text = f"{dotted_key(route)}: there is no {refused[1]!r}" if route else f"there is no setting {refused[1]!r}"
        text += meant(refused[1], _accepted(message, route, known))
        route = (*route, refused[1])
    else:
        text = _mistyped(message, route)
    words = [word.partition("=")[0].removeprefix("--").split(".") for word in overrides if word.startswith("--")]
    if any(route and word[0] == route[0] and word[-1] == route[-1] for word in words):
        return f"on the command line: {text}"
    where = next((place for place in (_placed(config, route) for config in reversed(configs)) if place), "")
    return f"{where}{text}"


def _accepted(message: str, route: Route, known: Keys) -> Sequence[str]:
    """What could have stood in the place of a key that was refused."""
    below = known.get(str(route[0])) if route else known
    if below is not None:
        return list(below)
    classes = _CLASS.findall(message)
    return (arguments_of(find(classes[-1])) if classes else None) or []


def _mistyped(message: str, route: Route) -> str:
    """A value of a wrong type, in one line; anything else as it was given."""
    keys = list(_KEY.finditer(message))
    tail = message[keys[-1].end() :] if keys else message
    got = _GOT.search(tail)
    wanted = [first or other for first, other in _EXPECTED.findall(tail[: got.end()] if got else "")]
    if got is None or not wanted:
        return f"{dotted_key(route)}: {tail.lstrip(': ').strip()}" if route else message
    names = dict.fromkeys(name.replace("NoneType", "null").replace("Literal", "one of ") for name in wanted)
    value = got[1].partition(". Got value")[0]
    near = meant(value, [word for name in names for word in re.findall(r"'([^']+)'", name)])
    return f"{dotted_key(route)}: this must be {' or '.join(names)}, and is {value}{near}"


def _placed(config: Config, route: Route) -> str:
    """The line of a key; keys of a class stand below its arguments."""
    for length in range(len(route), 0, -1):
        for tried in _with_args(route[:length]):
            if tried in config.lines:
                return f"{config.path}:{config.lines[tried]}: "
    return ""


def _with_args(route: Route) -> Iterator[Route]:
    yield route
    for at in range(1, len(route)):
        yield (*route[:at], ARGS, *route[at:])


def _flat(known: Keys, above: str = "") -> list[str]:
    keys = []
    for key, below in known.items():
        keys += [above + key, *(_flat(below, f"{above}{key}.") if below else ())]
    return keys
