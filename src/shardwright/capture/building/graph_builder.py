"""The graph while it is being made: steps in order, names that mean nothing yet.

A `GraphBuilder` is what the conversion writes to and the clean-up reads from. It differs from
an `ir.Graph` in that tensors stand in the arguments by name (`ValueRef`), names are plain
counters, and each step remembers where in the user's model it came from (`OpOrigin`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...ir import MaskStructure, SourceLine
from ...ops import spec_of


@dataclass(frozen=True, slots=True)
class ValueRef:
    """A tensor among the arguments of a step."""

    name: str


@dataclass(frozen=True, slots=True)
class ValueInfo:
    """What is known of a value."""

    shape: tuple[int, ...]
    dtype: str
    gradient: bool = False

    @property
    def floating(self) -> bool:
        return self.dtype.startswith(("float", "bfloat", "complex"))


@dataclass(frozen=True, slots=True, kw_only=True)
class OpOrigin:
    """Where in the user's model a step comes from, and under which modes it ran."""

    path: str = ""  # the module, with "@1" for its second call
    module: str = ""  # the module
    owner: str = ""  # the innermost module that is not one of torch.nn's, with its call
    source: SourceLine | None = None
    callers: tuple[SourceLine, ...] = ()  # the lines that called it, the innermost last
    region: str | None = None
    autocast: str | None = None
    no_grad: bool = False


@dataclass(slots=True)
class DraftOp:
    target: str
    arguments: dict[str, Any]
    outputs: list[str]
    place: OpOrigin
    kind: str  # what the op is called in its name
    mask: MaskStructure | None = None

    def inputs(self) -> list[str]:
        """The values it reads, each once, in order of first use."""
        return list(dict.fromkeys(ref.name for ref in refs(self.arguments)))


@dataclass(slots=True)
class GraphBuilder:
    infos: dict[str, ValueInfo] = field(default_factory=dict)
    steps: list[DraftOp] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    loose: set[str] = field(default_factory=set)  # values whose strides may differ from the traced ones
    renamed: dict[str, str] = field(default_factory=dict)  # values that another one now stands for
    names: dict[str, str] = field(default_factory=dict)  # of values that a line of the user's would name wrongly

    def now(self, name: str) -> str:
        """The value that stands for `name` after clean-up."""
        while name in self.renamed:
            name = self.renamed[name]
        return name

    def value(self, info: ValueInfo) -> str:
        name = f"v{len(self.infos)}"
        self.infos[name] = info
        return name

    def emit(
        self,
        target: str,
        arguments: Mapping[str, Any],
        infos: Sequence[ValueInfo],
        place: OpOrigin,
        kind: str | None = None,
    ) -> list[str]:
        """Append a step; `infos` describe its outputs, their gradient is worked out here."""
        spec = spec_of(target)
        flows = not place.no_grad and spec.gradient != "none"
        flows = flows and any(self.infos[ref.name].gradient for ref in refs(arguments))
        first_only = spec.gradient == "first"
        outputs = [
            self.value(ValueInfo(info.shape, info.dtype, flows and info.floating and not (first_only and index)))
            for index, info in enumerate(infos)
        ]
        if not spec.dense and any(ref.name in self.loose for ref in refs(arguments)):
            self.loose.update(outputs)
        self.steps.append(DraftOp(target, dict(arguments), outputs, place, kind or base_name(target)))
        return outputs

    def emit_one(
        self, target: str, arguments: Mapping[str, Any], info: ValueInfo, place: OpOrigin, kind: str | None = None
    ) -> str:
        return self.emit(target, arguments, [info], place, kind)[0]


def base_name(target: str) -> str:
    """The kind of op: "linear" of "aten.linear.default", "Fn" of "call.my.module.Fn"."""
    parts = target.split(".")
    return parts[-1] if parts[0] == "call" else parts[1]


def refs(arguments: Any) -> Iterator[ValueRef]:
    if isinstance(arguments, ValueRef):
        yield arguments
    elif isinstance(arguments, tuple | list):
        for inner in arguments:
            yield from refs(inner)
    elif isinstance(arguments, Mapping):
        for inner in arguments.values():
            yield from refs(inner)


def map_refs(arguments: Any, change: Callable[[ValueRef], Any]) -> Any:
    if isinstance(arguments, ValueRef):
        return change(arguments)
    if isinstance(arguments, tuple | list):
        return tuple(map_refs(inner, change) for inner in arguments)
    if isinstance(arguments, dict):
        return {name: map_refs(inner, change) for name, inner in arguments.items()}
    return arguments
