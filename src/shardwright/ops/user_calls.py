"""Ops that are calls of the user's own Python: opaque submodules, branches and loops over data.

They have no rule, and so run replicated on every device, except for an opaque submodule that is
declared to have independent samples (dim 0 of what it takes and returns may be split) and a layer
of experts, which brings its rule along.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import LoweringError
from ..ir import Op
from ..layout import Mesh
from ..rules.registry import OpCall, letters
from ..rules.signature import Signature
from .contexts import (
    AlgorithmCollective,
    LocalCall,
    ProgramOnRank,
    RankRun,
    RuntimeArguments,
    SavedForBackward,
)
from .localizing import cut_axes, in_mesh_order
from .printing import Printing, axes_text
from .reading import Arguments, Reader, UnreadableLineError, as_tuple, dotted, keywords, read_form
from .spec import define

OPAQUE = "call.opaque"
COND, SCAN, WHILE = "call.cond", "call.scan", "call.while_loop"
COUNT = 8
"""Bytes of a count."""


def opaque(call: OpCall) -> str | None:
    if call.op.argument("rule"):
        return str(call.op.argument("rule"))
    if not call.op.argument("batch"):
        return None
    rows = call.outputs[0].shape[0]
    arguments = len(call.op.argument("tensors"))
    inputs = [
        _rows(value.shape, f"i{at}") if at < arguments and value.shape[:1] == (rows,) else "?"
        for at, value in enumerate(call.inputs)
    ]
    return f"{', '.join(inputs)} -> {', '.join(_rows(out.shape, f'o{at}') for at, out in enumerate(call.outputs))}"


def _rows(shape: tuple[int, ...], prefix: str) -> str:
    """Dim 0 may be split, the others not."""
    return " ".join(["b", *(f"{label}^" for label in letters(len(shape) - 1, prefix))])


def has_experts(op: Op) -> bool:
    """Whether an op is a layer of experts, which is kept as one op."""
    return op.target == OPAQUE and bool(op.argument("rule"))


def local_opaque(program: ProgramOnRank, op: Op) -> Op:
    """Where its samples are split, a part draws other random numbers per rank; split experts are found by theirs."""
    split = [axis for axis in cut_axes(program.layouts[op.outputs[0]]) if not program.varies_in_time(axis)]
    axes = in_mesh_order(program, tuple(split))
    op = op.with_arguments(axes=axes) if axes else op
    stacked = [program.layouts[op.inputs[slot.index]].shards for slot in op.argument("state")]
    expert_shards = [shards[0] for shards in stacked if shards and shards[0]] if op.argument("rule") else []
    if not expert_shards:
        return op
    if len(expert_shards[0]) > 1:
        raise LoweringError(f"{op}: experts can be split on one axis only")
    (shard,) = expert_shards[0]
    return replace(op, target="runtime.experts").with_arguments(expert_axes=(shard.axis,), sharding=shard)


# -- in generated code


def print_opaque(p: Printing) -> str:
    """A part of the user's model that stays as it is; it takes its parameters from the stage, except those named."""
    p.skip("batch", "rule")  # they say how it may be split
    shown = [p["op_key"], *(p.show(slot) for slot in p.literal("tensors"))]
    passed = [f'"{name}": {p.show(slot)}' for name, slot in zip(p.literal("names"), p.literal("state"), strict=True)]
    shown += [f"state={{{', '.join(passed)}}}"] if passed else []
    shown += [f"over={axes_text(p.literal('axes'))}"] if p.literal("axes") else []
    if p.literal("expert_axes"):
        shown += [f"expert_axes={axes_text(p.literal('expert_axes'))}", f"sharding={p['sharding']}"]
        return f"self.experts({', '.join(shown)})"
    return f"self.opaque({', '.join(shown)})"


def read_opaque(op: Op, node: ast.expr) -> Arguments:
    callee = "self.experts" if op.target == "runtime.experts" else "self.opaque"
    if not isinstance(node, ast.Call) or dotted(node.func) != callee:
        raise UnreadableLineError(f"it is no call of {callee}")
    read: Arguments = {
        "op_key": node.args[0],
        "tensors": as_tuple(node.args[1:]),
        "state": ast.Dict(keys=[], values=[]),
    }
    return read | {{"over": "axes"}.get(name, name): value for name, value in keywords(node)}


def expects_own_parameters(op: Op, arguments: dict[str, Any], values: Mapping[str, str]) -> dict[str, Any]:
    """A line names the parameters that the part would not find under their own keys; `values` has those of keys."""
    lead = op.argument("op_key").split("@")[0]
    pairs = zip(op.argument("names"), op.argument("state"), strict=True)
    named = {
        name: slot for name, slot in pairs if values.get(f"{lead}.{name}" if lead else name) != op.inputs[slot.index]
    }
    return {**arguments, "state": named}


def print_cond(p: Printing) -> str:
    operands = p.literal("operands")
    shown = [p["predicate"]]
    for role in ("then", "other"):
        picked = tuple(operands[at] for at in p.literal(f"{role}_takes"))
        shown += [f"self.{p.literal(role)}", p.show(picked)]
    return f"runtime.cond({', '.join(shown)})"


def expects_operands(op: Op, arguments: dict[str, Any], values: Mapping[str, str]) -> dict[str, Any]:
    """Each branch is given the operands that it takes."""
    operands = op.argument("operands")
    taken = {
        f"{role}_operands": tuple(operands[at] for at in op.argument(f"{role}_takes")) for role in ("then", "other")
    }
    return {**arguments, **taken}


def print_scan(p: Printing) -> str:
    return f"runtime.scan(self.{p.literal('step')}, {p['init']}, {p['xs']}, {p['captured']})"


def print_while_loop(p: Printing) -> str:
    bodies = f"self.{p.literal('test')}, self.{p.literal('body')}"
    return f"runtime.while_loop({bodies}, {p['carried']}, {p['captured']})"


def read_control_flow(*names: str) -> Reader:
    def read(op: Op, node: ast.expr) -> Arguments:
        return read_form(op, node, f"{op.target.replace('call.', 'runtime.')}({', '.join(names)})")

    return read


def print_custom_algorithm(p: Printing) -> str:
    shown = [f"{name}={p.show(value)}" if name else p.show(value) for name, value in p.literal("given")]
    arguments = f"{p['path']}, {p['label']}, {axes_text(p.literal('axes'))}, {p['size']}"
    return f"runtime.custom_algorithm({arguments})({', '.join(shown)})"


def read_custom_algorithm(op: Op, node: ast.expr) -> Arguments:
    """`runtime.custom_algorithm(path, label, group, size)(...)`: a custom algorithm, and what it is called with."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Call):
        raise UnreadableLineError("it is no call of a custom algorithm")
    read = read_form(op, node.func, "runtime.custom_algorithm(path, label, axes, size)")
    pairs = [*(("", value) for value in node.args), *keywords(node)]
    return read | {"given": as_tuple([as_tuple([ast.Constant(value=name), value]) for name, value in pairs])}


# -- run op by op


def run_custom_algorithm(run: RankRun, a: RuntimeArguments) -> Any:
    return run.call_custom(run.runtime.custom_algorithm(a["path"], a["label"], run.group(a["axes"]), a["size"]), a)


def run_experts(run: RankRun, a: RuntimeArguments) -> Any:
    """The layer on this rank's experts, run as the opaque part that it is."""

    def layer(*tensors: Any) -> Any:
        with run.random.drawing(a["op_key"]):
            return run.call_opaque(a, tensors)

    hidden, index, weights = a["tensors"]
    return run.experts(layer, hidden, index, weights, run.group(a["expert_axes"]), a["sharding"])


# -- cost


def opaque_flops(call: OpCall) -> float:
    """Of experts, each token meets k. Nobody looks inside of other parts: every row may meet every parameter."""
    if has_experts(call.op):
        shapes = [value.shape for value in call.inputs]
        return 2.0 * math.prod(shapes[1]) * sum(math.prod(shape[1:]) for shape in shapes[3:] if len(shape) > 2)
    positions = math.prod(call.outputs[0].shape[:-1]) if call.outputs else 0
    weights = call.inputs[len(call.op.argument("tensors")) :]
    size = max((value.elements for value in call.outputs), default=0)
    return max(float(size), 2.0 * positions * sum(value.elements for value in weights))


def saved_opaque(call: LocalCall, signature: Signature, flat: Sequence[bool] | None) -> SavedForBackward | None:
    """Of experts all inputs, and what lies between their two matmuls for every token and each of its k experts.

    Where tokens and experts are both split, it does not show whether what lies between is: it is taken to be whole.
    """
    if not has_experts(call.op):
        return None
    values = signature.analysis.graph.values
    tokens, picked = call.inputs[0], call.inputs[1]
    width = values[call.op.inputs[0]].shape[-1]
    unsplit = tokens.elements == values[call.op.inputs[0]].elements
    between = 0.0
    for name, tensor in zip(call.op.inputs[3:], call.inputs[3:], strict=True):
        value = values[name]
        if len(value.shape) > 2 and value.shape[-2] != width:
            between += value.shape[-2] * (tensor.elements / value.elements if unsplit else 1.0)
    extra = picked.elements * tokens.item * (4 * width + 2 * between)
    return SavedForBackward((True,) * len(call.inputs), (False,) * len(call.outputs), extra)


def send_tokens(
    call: LocalCall, signature: Signature, axes: Mapping[str, tuple[str, ...]], mesh: Mesh
) -> list[AlgorithmCollective]:
    """all_to_all of the tokens, their weights and experts, and back, as if every expert got as many tokens."""
    if "experts" not in axes:
        return []
    hidden, index, weights = call.inputs[:3]
    ranks = math.prod(mesh.axis(name).size for name in axes["experts"])
    routed = hidden.bytes * signature.analysis.graph.values[signature.op.inputs[1]].shape[-1]  # once for each expert
    shares = index.elements * weights.item
    sizes = (ranks * COUNT, routed, shares, index.elements * COUNT, routed)
    collectives = [AlgorithmCollective("all_to_all", size, axes["experts"], "forward") for size in sizes]
    if call.gradient:
        back = [routed] * (1 + hidden.gradient) + [shares] * weights.gradient
        collectives += [AlgorithmCollective("all_to_all", size, axes["experts"], "backward") for size in back]
    return collectives


# -- definitions

PART = {"prints": print_opaque, "reads": read_opaque, "unprinted": ("names", "batch", "rule"),
        "expects": expects_own_parameters}  # fmt: skip
define(OPAQUE, rule=opaque, localize=local_opaque, flops=opaque_flops, saved=saved_opaque, collectives=send_tokens,
       **PART)  # fmt: skip
define("runtime.experts", runs=run_experts, **PART)
define(COND, prints=print_cond, expects=expects_operands, unprinted=("operands", "then_takes", "other_takes"),
       reads=read_control_flow("predicate", "then", "then_operands", "other", "other_operands"))  # fmt: skip
define(SCAN, prints=print_scan, reads=read_control_flow("step", "init", "xs", "captured"))
define(WHILE, prints=print_while_loop, reads=read_control_flow("test", "body", "carried", "captured"))
define("runtime.custom_algorithm", prints=print_custom_algorithm, reads=read_custom_algorithm,
       runs=run_custom_algorithm)  # fmt: skip
