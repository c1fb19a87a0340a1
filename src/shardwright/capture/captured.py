"""What capture hands on: the graph, and how a call of the user's model maps onto it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import InputError
from ..ir import Graph
from .tracing.attribute_reads import Reads
from .tracing.variables import Variable
from .user_calls.opaque_call import OpaqueCall


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedFunction:
    """A function that the graph calls by name and that generated code has to import."""

    call: Callable[..., Any]
    module: str
    qualname: str
    plain: Callable[..., Any] | None = None  # the same without torch.compile


@dataclass(frozen=True, slots=True, kw_only=True)
class InputLeaf:
    """A leaf of the call's arguments: a tensor that is a graph input, or a literal that was fixed."""

    path: str
    value: str | None = None  # the graph input, for a tensor
    shape: tuple[int, ...] = ()
    dtype: str = ""
    literal: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskFacts:
    """What a capture may take attention masks to be, beside what their ops say.

    buffers    values, by key, of buffers that the module itself has none of: one that holds a mask becomes a constant
    unpadded   inputs that tell which keys are padding say that there is none
    """

    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    unpadded: bool = False


NO_FACTS = MaskFacts()


@dataclass(frozen=True, kw_only=True)
class CapturedGraph:
    """A graph with everything that is needed to call it as the module was called."""

    graph: Graph
    in_spec: pytree.TreeSpec  # of (args, kwargs)
    out_spec: pytree.TreeSpec
    input_leaves: tuple[InputLeaf, ...]
    constants: Mapping[str, torch.Tensor]
    functions: Mapping[str, ImportedFunction]
    keywords: tuple[str, ...] = ()  # the keyword arguments, in the order of in_spec
    opaques: Mapping[str, OpaqueCall] = field(default_factory=dict)  # the calls of opaque submodules, by op_key
    reads: Reads = frozenset()  # the attributes of modules that are constants in the graph
    variables: tuple[Variable, ...] = ()  # globals and the like that may be
    fixed_buffers: tuple[str, ...] = ()  # the keys of buffers whose values are constants in the graph
    padding: tuple[tuple[str, int], ...] = ()  # inputs, and the number that says of all keys that they are no padding
    left: tuple[str, ...] = ()  # the attributes of modules that the call has set, and that a program does not

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """The tensors for graph.inputs, in order; an InputError if this call needs another capture."""
        if set(kwargs) != set(self.keywords):
            raise InputError(
                f"the model was captured with keyword arguments {sorted(self.keywords)} and is called with "
                f"{sorted(kwargs)}; capture it again with these"
            )
        ordered = {name: kwargs[name] for name in self.keywords}
        leaves, spec = pytree.tree_flatten((tuple(args), ordered))
        if spec != self.in_spec:
            raise InputError("the arguments are nested in another way than when the model was captured; capture again")
        tensors = []
        for leaf, known in zip(leaves, self.input_leaves, strict=True):
            if known.value is not None and isinstance(leaf, torch.Tensor):
                tensors.append(leaf)
            elif known.value is not None or not same_literal(leaf, known.literal):
                raise InputError(
                    f"{known.path} was {'a tensor' if known.value else repr(known.literal)} when the model was "
                    f"captured and is {leaf!r} now; capture it again with this value"
                )
        return tensors

    def unflatten(self, outputs: Sequence[torch.Tensor | None]) -> Any:
        """The model's return value from one entry per graph output (literals are filled in)."""
        leaves = [
            output.literal if output.value is None else _number(tensor) if output.number else tensor
            for tensor, output in zip(outputs, self.graph.outputs, strict=True)
        ]
        return pytree.tree_unflatten(leaves, self.out_spec)


def _number(tensor: torch.Tensor | None) -> Any:
    assert tensor is not None
    return tensor.item()


def same_literal(first: object, other: object) -> bool:
    return type(first) is type(other) and bool(first == other)
