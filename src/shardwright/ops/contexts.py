"""What the functions of an `OpSpec` are given: a call and what surrounds it, in each part of the compiler.

Tables of numbers are defined here. What is a graph, a program or a run elsewhere is described by a protocol, so that
ops don't depend on the parts of the compiler that ask about them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from ..cluster import Collective
from ..ir import Op, Value
from ..layout import Layout, Mesh
from ..rules.signature import Analysis

# -- cost: numbers of elements and bytes


@dataclass(frozen=True, slots=True)
class Passes:
    """How often an op goes over its tensors in memory.

    inputs, outputs    forward, over the bytes of all inputs and of all outputs
    results, gradients backward, over the bytes of the outputs (their gradients are read, saved results are read) and
                       over those of the inputs that have a gradient (saved ones are read, gradients are written)
    kernels            of the backward pass, if there are several
    """

    inputs: float = 1
    outputs: float = 1
    results: float = 1
    gradients: float = 2
    kernels: int = 1


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """What a device has of a tensor of an op: that of the first device, which has the most."""

    elements: float
    item: int
    dtype: str
    gradient: bool
    parameter: bool = False

    @property
    def bytes(self) -> float:
        return self.elements * self.item

    @property
    def floating(self) -> bool:
        return self.dtype.startswith(("float", "bfloat", "complex"))


@dataclass(frozen=True, slots=True)
class LocalCall:
    """One call of an op on a device.

    flops     those of the forward pass
    copies    a reshape that can't be a view
    moved     bytes that the forward pass reads and writes, where the op says it; backward moves twice as many
    multiplies_in    the dtype of a product, where that is narrower than its inputs: "float8"
    """

    op: Op
    flops: float
    inputs: tuple[LocalTensor, ...]
    outputs: tuple[LocalTensor, ...]
    copies: bool = False
    moved: float | None = None
    multiplies_in: str | None = None

    @property
    def gradient(self) -> bool:
        """Whether there is a backward pass."""
        return not self.op.no_grad and any(output.gradient for output in self.outputs)


@dataclass(frozen=True, slots=True)
class SavedForBackward:
    """For each input and output whether backward needs it, and the bytes that are saved beside them."""

    inputs: tuple[bool, ...]
    outputs: tuple[bool, ...]
    extra: float = 0.0


class AlgorithmCollective(NamedTuple):
    """One collective of an op; `overlapped` if it runs beside the op's own kernels."""

    collective: Collective
    bytes: float
    axes: tuple[str, ...]
    when: Literal["forward", "backward"]
    overlapped: bool = False


# -- lowering


GROUP_ARGUMENTS = ("axes", "samples", "classes", "expert_axes", "ring")
"""The arguments of ops of the runtime that hold the axes of a process group."""


class ProgramOnRank(Protocol):
    """A program that is being lowered."""

    @property
    def values(self) -> Mapping[str, Value]: ...
    @property
    def layouts(self) -> Mapping[str, Layout]: ...
    @property
    def mesh(self) -> Mesh: ...
    @property
    def analysis(self) -> Analysis: ...
    def sizes_of(self, value: str) -> tuple[Any, ...]:
        """The local size of every dim of a value, in atoms."""

    def varies_in_time(self, axis: str) -> bool:
        """Whether an axis is that of the microbatches, which follow each other."""


# -- capture


class ValueFacts(Protocol):
    """Shape and dtype of a value."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def gradient(self) -> bool: ...
    @property
    def floating(self) -> bool: ...


class TracedCall(Protocol):
    """A call of a trace, on its way into a graph. Tensors stand in the arguments as references (`is_value`)."""

    @property
    def target(self) -> str: ...
    @property
    def arguments(self) -> dict[str, Any]: ...
    @property
    def infos(self) -> Sequence[Any]: ...
    @property
    def info(self) -> ValueFacts:
        """The first result."""

    @property
    def first(self) -> Any:
        """The tensor that the call is about,"""

    @property
    def input_info(self) -> ValueFacts:
        """and what is known of it."""

    def is_value(self, argument: Any) -> bool: ...
    def info_of(self, ref: Any) -> Any: ...
    def describe(self, shape: Sequence[int], dtype: str) -> Any:
        """Facts of a value that is to be made."""

    def emit(self, target: str | None = None, kind: str | None = None, /, **arguments: Any) -> list[str]:
        """Put an op into the graph; the names of its results."""

    def keep(self) -> list[str]:
        """The call as it is."""

    def emit_one(self, target: str, arguments: dict[str, Any], info: Any, kind: str | None = None) -> Any:
        """Put an op with one other result into the graph, and refer to it."""

    def emit_with(self, target: str, arguments: dict[str, Any], infos: Sequence[Any]) -> list[str]:
        """Put an op with other results into the graph."""

    def write(self, target: str, arguments: dict[str, Any], infos: Sequence[Any]) -> list[str]:
        """Another call instead, in its own canonical form."""

    def identity(self, ref: Any) -> list[str]:
        """The value as it is."""

    def loosen(self, ref: Any) -> None:
        """Strides of a value may differ from the traced ones."""

    def is_loose(self, ref: Any) -> bool: ...
    def reference(self, name: str) -> Any: ...
    def element_numbers(self, size: Sequence[int], strides: Sequence[int], offset: int) -> Any:
        """Places in memory as a constant of the graph."""

    def unsupported(self, what: str, remedy: str) -> Exception: ...


class ViewWrite(Protocol):
    """A write through a view: `new` takes the place of what the view shows of `parent`."""

    @property
    def target(self) -> str: ...
    @property
    def options(self) -> dict[str, Any]:
        """The arguments of the view but its tensor."""

    @property
    def index(self) -> int:
        """Which of the results of the view is written to."""

    @property
    def parent(self) -> Any: ...
    @property
    def new(self) -> Any: ...
    @property
    def shape(self) -> tuple[int, ...]:
        """Of the parent,"""

    @property
    def new_shape(self) -> tuple[int, ...]:
        """and of what is written."""

    @property
    def as_it_is(self) -> str:
        """The name of what is written."""

    def emit(self, target: str, /, **arguments: Any) -> str:
        """Put an op into the graph whose result has the shape of the parent."""

    def element_numbers(self, size: Sequence[int], strides: Sequence[int], offset: int) -> Any: ...


# -- running


class RuntimeArguments(Protocol):
    """The arguments of an op by name, with tensors in them; None for what was not given."""

    @property
    def op(self) -> Op: ...
    @property
    def tensors(self) -> Sequence[Any]: ...
    def __getitem__(self, name: str) -> Any: ...
    def get(self, name: str, default: Any = None) -> Any: ...


class RankRun(Protocol):
    """A run of a program op by op on a rank."""

    @property
    def runtime(self) -> Any:
        """The module `shardwright.runtime`."""

    @property
    def comm(self) -> Any:
        """The module of the collectives."""

    @property
    def random(self) -> Any: ...
    def group(self, axes: str | tuple[str, ...] | None) -> Any:
        """The process group over some axes; None for none."""

    @property
    def experts(self) -> Any:
        """The algorithm that sends tokens to the ranks of their experts."""

    def call_custom(self, function: Any, arguments: RuntimeArguments) -> Any:
        """Call a custom algorithm."""

    def call_opaque(self, arguments: RuntimeArguments, tensors: tuple[Any, ...]) -> Any:
        """Call an opaque part on some tensors."""
