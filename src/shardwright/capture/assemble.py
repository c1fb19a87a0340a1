"""Capture from end to end: trace, convert, clean up, name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..batch_dim import find_batch_dim
from ..errors import CaptureError
from ..ir import Buffer, Graph, Input, Op, Output, Parameter, check
from ..ops.user_calls import OPAQUE
from .building.aliases import TensorHandle
from .building.call_paths import input_paths, output_paths
from .building.control_flow import BranchGraphs
from .building.control_flow import functions as run_branches
from .building.convert import GraphConversion, Modes
from .building.finish import drop_dead, join_repeats, ops_of, promote_floats, values_of
from .building.graph_builder import GraphBuilder, ValueInfo
from .building.leaves import Leaves
from .building.value_names import value_names
from .captured import NO_FACTS, CapturedGraph, ImportedFunction, InputLeaf, MaskFacts
from .copies import copy_module
from .interpret import run_plain
from .masks import check_documents, dense_mask_notes, structure_masks
from .tracing.attribute_reads import Reads, everything
from .tracing.export import Trace, trace, without_collection
from .tracing.python_numbers import Number
from .tracing.registration import nothing_registered
from .user_calls.find_opaque import name_submodule, notes_of, widen
from .user_calls.opaque_call import OpaqueBody, OpaqueCall, runner
from .user_calls.real_run import Real

Result = TypeVar("Result")


@without_collection()
def capture(
    module: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    entry: str = "train",
    promote: bool = False,
    name: str | None = None,
    real: Real | None = None,
    masks: MaskFacts = NO_FACTS,
) -> CapturedGraph:
    """The graph of one call of a module, at the shapes of the example arguments.

    Parameters and inputs may be real, fake or on meta; nothing is run or allocated, and the
    module is left as it was. With `promote` every float in the graph is a float64. Only what an
    opaque submodule returns may have to be looked at in a run, of `real` or else of this call.
    If the module was given to `find_opaque`, submodules that can't be captured become opaque. `masks` says what
    attention masks may be taken to be.
    """
    module, args, kwargs = getattr(module, "_orig_mod", module), tuple(args), dict(kwargs or {})

    def make() -> CapturedGraph:
        traced = trace(module, args, kwargs, real or (lambda: (module, args, kwargs)))
        return _assembled(traced, module, args, kwargs, entry, promote, name, masks)

    with nothing_registered(module):
        return _widened(module, make)


@without_collection()
def capture_pair(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, entry: str, real: Real,
    promote: Callable[[Graph], bool], masks: MaskFacts = NO_FACTS,
) -> tuple[CapturedGraph, CapturedGraph | None]:  # fmt: skip
    """What `capture` gives without `promote` and, if that is wanted for this graph, with it: of one trace."""
    module = getattr(module, "_orig_mod", module)

    def make() -> tuple[CapturedGraph, CapturedGraph | None]:
        traced = trace(module, args, kwargs, real)
        plain = _assembled(traced, module, args, kwargs, entry, False, None, masks)
        wanted = promote(plain.graph)
        return plain, _assembled(traced, module, args, kwargs, entry, True, None, masks) if wanted else None

    with nothing_registered(module):
        return _widened(module, make)


def _widened(module: nn.Module, make: Callable[[], Result]) -> Result:
    """What `make` gives, once all is opaque that has to be and may be."""
    while True:
        try:
            return make()
        except CaptureError as error:
            if not widen(module, error):
                refused = name_submodule(error)
                refused.__context__ = error.__cause__  # not printed: a screen of torch's frames around one sentence
                raise refused from None


def _assembled(
    traced: Trace, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], entry: str, promote: bool,
    name: str | None, masks: MaskFacts,
) -> CapturedGraph:  # fmt: skip
    leaves = Leaves(module, traced, GraphBuilder(), masks)
    paths = input_paths(module, args, kwargs)
    handles = leaves.placeholders(pytree.tree_leaves((args, kwargs)), paths)
    branches = BranchGraphs(promote)
    conversion = GraphConversion(
        leaves.builder, traced.user_calls, frozenset(leaves.parameters), leaves.constant, branches
    )
    results = list(conversion.run(traced.program.graph_module, handles, Modes()))
    leaves.check_writes()
    leaves.builder.notes += [*notes_of(module), *traced.notes]
    graph, names = _finish(traced, leaves, results, promote, entry, name or type(module).__name__, branches)
    classes = {path: type(part).__name__ for path, part in module.named_modules(remove_duplicate=False)}
    graph = replace(graph, classes=classes)
    opaques = {op.argument("op_key"): _opaque(traced, op, promote) for op in graph.ops if op.target == OPAQUE}
    functions = {**conversion.functions, OPAQUE: _runs_opaque(opaques, module)}
    functions |= run_branches(lambda branch, operands: run_plain(graph.branches[branch], operands, functions))
    return CapturedGraph(
        graph=graph,
        in_spec=pytree.tree_structure((args, kwargs)),
        out_spec=_out_spec(traced),
        input_leaves=tuple(_renamed(leaf, names, leaves.builder) for leaf in leaves.inputs),
        constants={
            names[value]: tensor.double() if promote and tensor.is_floating_point() else tensor
            for value, tensor in leaves.constants.items()
            if value in names
        },
        functions={op.target: functions[op.target] for op in _all_ops(graph) if op.target in functions},
        keywords=tuple(kwargs),
        opaques=opaques,
        reads=_reads(traced, module, opaques, bool(graph.branches)),
        variables=traced.variables,
        left=tuple(f"{path}.{name}".removeprefix(".") for path, name in traced.left),
        fixed_buffers=tuple(key for key, value in leaves.buffer_start.items() if value in leaves.fixed),
        padding=tuple((names[value], number) for value, number in leaves.padding.items()),
    )


def _reads(traced: Trace, module: nn.Module, opaques: Mapping[str, OpaqueCall], branches: bool) -> Reads:
    """The attributes that are constants: all, where dynamo has captured branches or a part runs as it is."""
    paths = [""] if branches else [call.path for call in opaques.values()]
    return traced.reads.union(*(everything(module, path) for path in paths))


def _all_ops(graph: Graph) -> list[Op]:
    return [op for region in (graph, *graph.branches.values()) for op in region.ops]


def _opaque(traced: Trace, op: Op, promote: bool) -> OpaqueCall:
    """How an opaque submodule is called. Where floats are promoted, what it returns has to follow."""
    call = traced.user_calls.calls[op.argument("op_key")]
    assert isinstance(call, OpaqueCall)
    wide = tuple(
        replace(output, dtype=torch.float64) if output.dtype.is_floating_point else output for output in call.outputs
    )
    return replace(call, outputs=wide) if promote else call


def _runs_opaque(calls: Mapping[str, OpaqueCall], module: nn.Module) -> ImportedFunction:
    """Runs them op by op, on copies, so that the module is left as it is."""
    parts = {call.path: module.get_submodule(call.path) for call in calls.values()}
    bodies = {path: OpaqueBody(copy_module(part)) for path, part in parts.items()}
    return ImportedFunction(call=runner(calls, module, bodies), module="shardwright", qualname="opaque")


def _finish(
    traced: Trace, leaves: Leaves, results: Sequence[Any], promoted: bool, entry: str, name: str, branches: BranchGraphs
) -> tuple[Graph, dict[str, str]]:
    """Clean the draft up and give everything its name; the graph, and the names by draft name."""
    builder = leaves.builder
    updates = {key: handle.read() for key, handle in leaves.buffers.items()}
    written = leaves.parameter_updates()
    ends = [
        result.read() if isinstance(result, TensorHandle) else result.name if isinstance(result, Number) else None
        for result in results
    ]
    if promoted:
        promote_floats(builder)
    join_repeats(builder)
    check_documents(leaves)  # while attention has its masks
    masks = structure_masks(leaves)
    updates = {key: builder.now(value) for key, value in updates.items()}
    written = {start: builder.now(value) for start, value in written.items()}
    ends = [None if value is None else builder.now(value) for value in ends]
    drop_dead(builder, [value for value in (*ends, *updates.values(), *written.values()) if value is not None])
    unread = leaves.constants.keys() - {value for step in builder.steps for value in step.inputs()} - set(ends)
    paths = output_paths(_out_spec(traced))
    roles = {value: key.rpartition(".")[2] for key, value in updates.items()}
    roles |= {end: _role(path, builder.infos[end]) for path, end in zip(paths, ends, strict=True) if end is not None}
    fixed = {value: option for value, option in leaves.options.items() if value not in unread}
    names = value_names(builder, fixed, roles)
    batch = find_batch_dim([(leaf.path, leaf.shape) for leaf in leaves.inputs])  # literals have the shape ()
    graph = Graph(
        name=name,
        entry=entry,
        values=values_of(builder, names),
        inputs=tuple(
            Input(value=names[leaf.value], path=leaf.path, batched=batched)
            for leaf, batched in zip(leaves.inputs, batch.batched, strict=True)
            if leaf.value
        ),
        parameters=tuple(
            Parameter(
                value=names[value],
                keys=tuple(keys),
                trainable=leaves.trainable[value],
                update=names[written[value]] if value in written else None,
            )
            for value, keys in leaves.parameters.items()
        ),
        buffers=_buffers(leaves, updates, names),
        ops=ops_of(builder, names),
        outputs=tuple(
            Output(path=path, value=names[end], number=isinstance(result, Number))
            if end is not None
            else Output(path=path, literal=result)
            for path, result, end in zip(paths, results, ends, strict=True)
        ),
        batch=batch.size,
        notes=(*builder.notes, *dense_mask_notes(masks, names, builder.infos)),
        branches=branches.graphs,
    )
    return check(graph), names


def _role(path: str, info: ValueInfo) -> str:
    """What an output is called by where it is returned; nothing for one that is returned alone and is no loss."""
    if path == "output":
        return "loss" if info.gradient and not info.shape else ""
    return path if path.isidentifier() else ""


def _out_spec(traced: Trace) -> pytree.TreeSpec:
    spec: pytree.TreeSpec | None = traced.program.call_spec.out_spec
    assert spec is not None
    return spec


def _buffers(leaves: Leaves, updates: Mapping[str, str], names: Mapping[str, str]) -> tuple[Buffer, ...]:
    transient = {
        f"{path}.{key}" if path else key
        for path, part in leaves.module.named_modules(remove_duplicate=False)
        for key in part._non_persistent_buffers_set
    }
    buffers: dict[str, Buffer] = {}
    for key, start in leaves.buffer_start.items():
        update = names[updates[key]] if updates[key] != start else None
        buffer = Buffer(value=names[start], key=key, persistent=key not in transient, update=update)
        buffers.setdefault(start, buffer)
    for value in leaves.constants:
        if value in names:
            key = f"constant.{len(buffers) - len(set(leaves.buffer_start.values()))}"
            buffers[value] = Buffer(value=names[value], key=key, persistent=False)
    return tuple(buffers.values())


def _renamed(leaf: InputLeaf, names: Mapping[str, str], builder: GraphBuilder) -> InputLeaf:
    if leaf.value is None:
        return leaf
    return replace(leaf, value=names[leaf.value], dtype=builder.infos[leaf.value].dtype)
