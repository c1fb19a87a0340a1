"""Norms: what is averaged over stays whole, or is summed over the ranks by an algorithm."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..ir import Op
from ..layout import Mesh
from ..rules.dims import blocked, label_dims, through, write_rule
from ..rules.notation import Rule
from ..rules.registry import OpCall
from ..rules.signature import Signature
from .contexts import (
    AlgorithmCollective,
    LocalCall,
    Passes,
    ProgramOnRank,
    RankRun,
    RuntimeArguments,
    TracedCall,
)
from .localizing import in_mesh_order, split_axes
from .printing import Printing, axes_text, function
from .reading import Arguments, read_form
from .spec import define

WIDE = {"float64": 8}
"""Sums are made in float32, or wider."""

# -- rules


def trailing_norm(call: OpCall) -> Rule:
    width = len(call.op.argument("normalized_shape", ()))
    names = label_dims(call.shape)
    names[len(names) - width :] = [blocked(name) for name in names[len(names) - width :]]
    rest = names[len(names) - width :]
    outs = [names]
    for value in call.outputs[1:]:
        outs.append([n if s != 1 else "1" for n, s in zip(names, value.shape, strict=True)])
    return write_rule([names, *[rest] * (len(call.inputs) - 1)], outs)


def group_norm(call: OpCall) -> Rule:
    """Rows are free, and so are whole groups of channels."""
    groups = call.op.argument("num_groups")
    inside = call.shape[1] // groups
    names = label_dims(call.shape)
    names[2:] = [blocked(name) for name in names[2:]]
    names[1] = str(inside) if groups == 1 else "g" if inside == 1 else f"(g {inside})"
    rest = [[names[1]] for _ in call.inputs[1:]]
    rule = write_rule([names, *rest], [names])
    return rule.with_sizes({"g": groups}).with_local({"num_groups": ("g",)})


def native_group_norm(call: OpCall) -> Rule:
    """Samples only: its kernel wants them to lie one after the other, which shards of channels do not."""
    outputs = [["n", *map(str, value.shape[1:])] for value in call.outputs]
    weights = [list(map(str, value.shape)) for value in call.inputs[1:]]
    return write_rule([outputs[0], *weights], outputs).with_local({"N": ("n",)})


def instance_norm(call: OpCall) -> Rule | None:
    """Each row and channel by itself; running statistics would be written to."""
    if call.tensor("running_mean") is not None and call.op.argument("use_input_stats"):
        return None
    names = label_dims(call.shape)
    names[2:] = [blocked(name) for name in names[2:]]
    return write_rule([names, *[[names[1]]] * (len(call.inputs) - 1)], [names])


def batch_norm(call: OpCall) -> Rule:
    """Channels are free. Rows, in training, by the algorithm that sums the statistics; in eval they are free too."""
    training = call.op.argument("training", True)
    names = label_dims(call.shape)
    names[0] = names[0] if names[0] == "1" else "n=batch" if training else "n"
    names[1] = "ch" if call.shape[1] != 1 else "1"
    names[2:] = [blocked(name) for name in names[2:]]
    plain = [name.split("=")[0] for name in names]
    outs = [plain]
    for value in call.outputs[1:]:
        per_channel = len(value.shape) == 1 and value.shape[0] == call.shape[1] != 1
        outs.append(["ch"] if per_channel else [str(size) for size in value.shape])
    return write_rule([names, *[[names[1]]] * (len(call.inputs) - 1)], outs)


def renorm(call: OpCall) -> Rule:
    """Each slice along a dim is scaled by its own norm."""
    return through(call, set(range(len(call.shape))) - {call.dim()})


# -- norms over the last dims


def local_trailing_norm(program: ProgramOnRank, op: Op) -> Op:
    width = len(op.argument("normalized_shape"))
    return op.with_arguments(normalized_shape=program.sizes_of(op.outputs[0])[-width:])


def print_layer_norm(p: Printing) -> str:
    shown = [p["input"], p["normalized_shape"]]
    shown += [p["weight"]] if p.has("weight") or p.has("bias") else []
    shown += [p["bias"]] if p.has("bias") else []
    return f"F.layer_norm({', '.join(shown)}{p.options('eps')})"


def _rows(call: LocalCall) -> float:
    """How many rows a norm over the last dims has."""
    width = math.prod(call.op.argument("normalized_shape", ()) or (1,))
    return call.inputs[0].elements / max(width, 1)


def mean_and_deviation(call: LocalCall, signature: Signature) -> float:
    return 8 * _rows(call)


def normed_rows(call: LocalCall, signature: Signature) -> float:
    """The inverse deviation of each row, and on a CPU the normed rows themselves, for the weight's gradient."""
    weight = any(tensor.gradient for tensor in call.inputs[1:])
    return 4 * _rows(call) + (call.inputs[0].bytes if weight else 0.0)


# one kernel reads dy and x and writes dx, a second reads both again for the weights
TRAILING = {"rule": trailing_norm, "localize": local_trailing_norm, "passes": Passes(results=2, gradients=3, kernels=2)}
define("layer_norm", saved="0 1 2", saved_extra=mean_and_deviation, dense=True, prints=print_layer_norm,
       reads="F.layer_norm(input, normalized_shape, weight, bias, eps)", **TRAILING)  # fmt: skip
define("native_layer_norm", saved="0 1 2", saved_extra=mean_and_deviation, **TRAILING)
define("rms_norm", saved="0 1", saved_extra=normed_rows, work=(1.0, 2.0), prints=function, **TRAILING)
define("_fused_rms_norm", saved="0 1", **TRAILING)


# -- norms over samples, channels or groups of them


def canonical_instance_norm(call: TracedCall) -> list[str]:
    if call.arguments.get("use_input_stats") and call.arguments.get("running_mean") is not None:
        remedy = "Build it with track_running_stats=False, or keep it out with sw.opaque(submodule)."
        raise call.unsupported("an instance norm that tracks statistics writes to them unseen", remedy)
    return call.keep()


def canonical_batch_norm(call: TracedCall) -> list[str]:
    """In training one op whose last two outputs are the new statistics (see convert.py)."""
    if len(call.input_info.shape) < 2:
        raise call.unsupported("a batch norm needs a dim of channels", "Give it two dims at least.")
    arguments = {name: value for name, value in call.arguments.items() if name != "cudnn_enabled"}
    empty = 0 in call.input_info.shape and arguments.get("running_mean") is not None  # nothing is seen, nothing changes
    if not arguments["training"] or empty:
        return call.emit(**{**arguments, "training": False, "cudnn_enabled": False})
    channel = call.describe((call.input_info.shape[1],), call.input_info.dtype)
    if arguments.get("running_mean") is None:
        arguments = {name: value for name, value in arguments.items() if not name.startswith("running")}
        return call.emit_with("aten._native_batch_norm_legit.no_stats", arguments, [call.info, channel, channel])
    running = call.info_of(arguments["running_mean"])
    infos = [call.info, channel, channel, running, running]
    return call.emit_with("aten._native_batch_norm_legit_functional.default", arguments, infos)


def local_batch_norm(program: ProgramOnRank, op: Op) -> Op:
    """In training always the runtime's: it gives the new statistics, and sums them where samples are split."""
    training = op.argument("training", "no_training" not in op.target)
    if not training:
        return op
    axes = in_mesh_order(program, split_axes(program.layouts[op.inputs[0]], 0))
    outputs = (op.outputs[0], *op.outputs[3:])  # the two between are what torch's own backward would save
    return replace(op, target="runtime.batch_norm", outputs=outputs).with_arguments(axes=axes)


def print_batch_norm(p: Printing) -> str:
    p.skip("training")  # always: in eval it is torch's
    axes = p.literal("axes")
    group = axes_text(axes) if axes else "None"
    return (
        f"runtime.batch_norm({p['input']}, {p['weight']}, {p['bias']}, {p['running_mean']}, {p['running_var']}, "
        f"{p['momentum']}, {p['eps']}, {group}){'' if len(p.op.outputs) > 1 else '[0]'}"
    )


def read_batch_norm(op: Op, node: ast.expr) -> Arguments:
    if isinstance(node, ast.Subscript) and len(op.outputs) == 1:
        node = node.value
    names = "input, weight, bias, running_mean, running_var, momentum, eps, axes"
    return read_form(op, node, f"runtime.batch_norm({names})")


STATE = ("weight", "bias", "running_mean", "running_var")
"""What a batch norm takes from its module."""


def module_of_batch_norm(count: Op, norm: Op, keys: Mapping[str, str], updates: Mapping[str, Any]) -> str | None:
    """The module of a batch norm in training and the count of batches before it, if they can be printed by it.

    keys      the values of parameters and buffers, by key
    updates   the keys that values are written to
    """
    if norm.target != "runtime.batch_norm" or len(norm.outputs) != 3 or count.target != "aten.add.Tensor":
        return None
    key = updates.get(norm.outputs[1], ("",))[0]
    module = key.removesuffix(".running_mean")
    if not module or module == key or norm.argument("momentum") is None or count.argument("other") != 1:
        return None
    if count.inputs != (keys.get(f"{module}.num_batches_tracked"),):
        return None
    return module if all(norm.tensor(name) == keys.get(f"{module}.{name}") for name in STATE) else None


def batch_norm_faults(count: Op, norm: Op, module: str, keys: Mapping[str, str]) -> Iterator[str]:
    """Where a line says a batch norm of a module, and the two ops that it stands for are something else."""
    counted = dict(count.arguments)
    if count.target != "aten.add.Tensor" or counted.get("other") != 1 or counted.get("alpha", 1) != 1:
        yield "its first op does not add one"
    if count.inputs != (keys.get(f"{module}.num_batches_tracked"),):
        yield "its first op does not count the batches of the module"
    if norm.target != "runtime.batch_norm" or len(norm.outputs) != 3 or norm.argument("training", True) is not True:
        yield "its second op is no batch norm in training"
    for name in ("weight", "bias", "running_mean", "running_var"):
        if norm.tensor(name) != keys.get(f"{module}.{name}"):
            yield f"its {name} is {norm.tensor(name)}"
    known = {"input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", "axes"}
    yield from (f"{name} is not in it" for name, value in norm.arguments if name not in known and value is not None)


def run_batch_norm(run: RankRun, a: RuntimeArguments) -> object:
    return run.runtime.batch_norm(
        a["input"], a["weight"], a["bias"], a["running_mean"], a["running_var"], a["momentum"], a["eps"],
        run.group(a["axes"]),
    )  # fmt: skip


def send_statistics(
    call: LocalCall, signature: Signature, axes: Mapping[str, tuple[str, ...]], mesh: Mesh
) -> list[AlgorithmCollective]:
    """With the batch split: an all_gather of 3 numbers a channel; backward an all_reduce of 2."""
    if "batch" not in axes:
        return []
    x, over = call.inputs[0], axes["batch"]
    size = WIDE.get(x.dtype, 4)
    per_channel = [tensor.elements for tensor in call.inputs[1:]]  # weights and statistics, split as the channels are
    shape = signature.analysis.graph.values[signature.op.inputs[0]].shape
    channels = per_channel[0] if per_channel else float(shape[1])
    ranks = math.prod(mesh.axis(name).size for name in over)
    collectives = [AlgorithmCollective("all_gather", ranks * 3 * channels * size, over, "forward")]
    if call.gradient and x.gradient:
        collectives.append(AlgorithmCollective("all_reduce", 2 * channels * size, over, "backward"))
    return collectives


def channel_statistics(call: LocalCall, signature: Signature) -> float:
    return 8.0 * signature.analysis.graph.values[call.op.inputs[0]].shape[1]


def group_statistics(call: LocalCall, signature: Signature) -> float:
    shape = signature.analysis.graph.values[call.op.inputs[0]].shape
    return 8.0 * shape[0] * float(call.op.argument("num_groups", call.op.argument("group", 1)))


def instance_statistics(call: LocalCall, signature: Signature) -> float:
    return 8.0 * math.prod(signature.analysis.graph.values[call.op.inputs[0]].shape[:2])


# statistics first, then the values: x is read twice, and dy and x are read twice
TWICE = {"saved": "0", "passes": Passes(inputs=2, results=2, gradients=3, kernels=2)}
BATCH = {"result": "norm", "localize": local_batch_norm, "collectives": send_statistics, "work": (0.0, 1.0), **TWICE}
define("batch_norm", rule=batch_norm, canonical=canonical_batch_norm, saved_extra=channel_statistics, prints=function,
       **BATCH)  # fmt: skip
define("_native_batch_norm_legit_functional", rule=batch_norm, saved_extra=channel_statistics, gradient="first",
       **BATCH)  # fmt: skip
define("_native_batch_norm_legit", rule={"no_stats": batch_norm}, gradient="first", **BATCH)
define("_native_batch_norm_legit_no_training", gradient="first")
define("native_batch_norm", saved="0")
define("runtime.batch_norm", prints=print_batch_norm, reads=read_batch_norm, defaults={"training": True},
       runs=run_batch_norm)  # fmt: skip
define("group_norm", rule=group_norm, saved_extra=group_statistics, prints=function, **TWICE)
define("native_group_norm", rule=native_group_norm, saved="0", saved_extra=group_statistics)
define("instance_norm", rule=instance_norm, canonical=canonical_instance_norm, work=(0.0, 1.0),
       saved_extra=instance_statistics, **TWICE)  # fmt: skip
define("renorm", rule=renorm)
