"""Values for a graph of known shapes: parameters, buffers, constants and inputs.

Floats are random. Buffers and inputs that have values are sliced to their leading elements, so that masks and tables
keep their meaning. Integers that index something stay below the size of what they index.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..compile import copy_to_meta
from ..ir import Graph, Op, Value

LOOKED_UP: dict[str, tuple[str, int]] = {
    "embedding": ("weight", 0), "gather": ("self", -2), "index_select": ("self", -2), "index": ("self", 0),
    "cross_entropy_loss": ("self", 1), "nll_loss": ("self", 1), "nll_loss_nd": ("self", 1), "scatter": ("self", -2),
    "nll_loss2d": ("self", 1), "embedding_bag": ("weight", 0), "one_hot": ("", 0),
}  # fmt: skip
"""For ops that index by integers: the indexed argument, and its dim; -2 for the op's dim."""


def cut_down(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The leading slice of a tensor."""
    for dim, size in enumerate(shape):
        tensor = tensor.narrow(dim, 0, size)
    return tensor.clone()


def _covers(known: Tensor, value: Value) -> bool:
    """Whether a tensor has values, and is large enough."""
    if known.is_meta or known.dim() != len(value.shape) or not known.numel():
        return False
    return all(have >= want for have, want in zip(known.shape, value.shape, strict=True))


def parameter(value: Value, generator: torch.Generator) -> Tensor:
    """Random weights: vectors around one, as in norms; matrices that preserve the scale of their inputs."""
    drawn = torch.randn(value.shape, generator=generator, dtype=torch.float64)
    window = value.shape[1:] if len(value.shape) > 3 else value.shape[-1:]
    scale = 0.1 if len(value.shape) < 2 else max(math.prod(window), 1) ** -0.5
    weights = drawn * scale + (1.0 if len(value.shape) < 2 else 0.0)
    return weights.to(getattr(torch, value.dtype))


def buffer(value: Value, known: Tensor | None, generator: torch.Generator) -> Tensor:
    """A buffer: its values if known, else ones that any model can read."""
    dtype = getattr(torch, value.dtype)
    if known is not None and _covers(known, value):
        return cut_down(known.detach(), value.shape).to(dtype)
    if value.dtype == "bool":
        return torch.ones(value.shape, dtype=dtype)
    if not value.floating:
        return torch.zeros(value.shape, dtype=dtype)
    return (0.5 + torch.rand(value.shape, generator=generator, dtype=torch.float64)).to(dtype)


def graph_input(graph: Graph, value: Value, known: Tensor | None, generator: torch.Generator) -> Tensor:
    """An input: from the example, or random; unknown integers that index nothing are ones."""
    dtype = getattr(torch, value.dtype)
    if value.floating:
        return torch.randn(value.shape, generator=generator, dtype=torch.float64).to(dtype)
    top = lookup_size(graph, value.name)
    if known is not None and _covers(known, value) and bool((known != known.flatten()[0]).any()):
        shard = cut_down(known, value.shape).to(dtype)
        return torch.where(shard >= top, shard % top, shard) if top is not None and dtype is not torch.bool else shard
    if top is None or dtype is torch.bool:
        return torch.ones(value.shape, dtype=dtype)
    return torch.randint(top, value.shape, generator=generator).to(dtype)


def lookup_size(graph: Graph, name: str) -> int | None:
    """The smallest dim indexed by a value, or by integers computed from it; None if none is."""
    reached, sizes = {name}, []
    for op in graph.ops:
        if not any(source in reached for source in op.inputs):
            continue
        reached |= {output for output in op.outputs if graph.values[output].dtype.startswith(("int", "uint"))}
        size = _looked_up(graph, op, reached)
        if size is not None:
            sizes.append(size)
    return min(sizes, default=None)


def _looked_up(graph: Graph, op: Op, reached: set[str]) -> int | None:
    argument, dim = LOOKED_UP.get(op.target.split(".")[1], ("", 0))
    if op.target.startswith("aten.one_hot"):
        return graph.values[op.outputs[0]].shape[-1]
    source = op.tensor(argument) if argument else None
    if source is None or source in reached:
        return None
    shape = graph.values[source].shape
    own = int(op.argument("dim", 0)) if dim == -2 else dim
    return shape[own if len(shape) > own else 0] if shape else None


class Plain(nn.Module):
    """A module that only has parameters. A rehearsal calls only the generated code."""


def module_of(
    graph: Graph, original: nn.Module, paths: Mapping[str, str], constants: Mapping[str, Tensor], seed: int
) -> nn.Module:
    """A module with parameters and buffers for a graph, under its keys, with random values.

    paths    opaque submodules, by their path here, with their path in the original
    """
    generator = torch.Generator().manual_seed(seed)
    root: nn.Module = type(graph.name, (Plain,), {})()  # messages name the user's model
    for path, before in paths.items():
        _place(root, path, copy_to_meta(original.get_submodule(before)))  # a copy: the user's is not changed
    known = dict(original.named_buffers(remove_duplicate=False))
    for source in graph.parameters:
        weights = nn.Parameter(parameter(graph.values[source.value], generator), requires_grad=source.trainable)
        for key in source.keys:
            owner, name = _owner(root, key)
            owner._parameters[name] = weights
    for state in graph.buffers:
        if state.value not in constants:
            owner, name = _owner(root, state.key)
            owner.register_buffer(
                name, buffer(graph.values[state.value], known.get(state.key), generator), persistent=state.persistent
            )
    return root.train(graph.entry.startswith("train"))


def _owner(root: nn.Module, key: str) -> tuple[nn.Module, str]:
    path, _, name = key.rpartition(".")
    at = root
    for part in path.split(".") if path else ():
        if part not in at._modules:
            at.add_module(part, Plain())
        at = at.get_submodule(part)
    return at, name


def _place(root: nn.Module, path: str, part: nn.Module) -> None:
    owner, name = _owner(root, path)
    owner.add_module(name, part)
