"""Norms: what is averaged over stays whole, or is summed over the ranks by an algorithm."""

from __future__ import annotations

from .dims import blocked, label_dims, through, write_rule
from .notation import Rule
from .registry import OpCall, rule


@rule("layer_norm", "rms_norm", "native_layer_norm", "_fused_rms_norm")
def trailing_norm(call: OpCall) -> Rule:
    width = len(call.op.argument("normalized_shape", ()))
    names = label_dims(call.shape)
    names[len(names) - width :] = [blocked(name) for name in names[len(names) - width :]]
    rest = names[len(names) - width :]
    outs = [names]
    for value in call.outputs[1:]:
        outs.append([n if s != 1 else "1" for n, s in zip(names, value.shape, strict=True)])
    return write_rule([names, *[rest] * (len(call.inputs) - 1)], outs)


@rule("group_norm")
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


@rule("instance_norm")
def instance_norm(call: OpCall) -> Rule | None:
    """Each row and channel by itself; running statistics would be written to."""
    if call.tensor("running_mean") is not None and call.op.argument("use_input_stats"):
        return None
    names = label_dims(call.shape)
    names[2:] = [blocked(name) for name in names[2:]]
    return write_rule([names, *[[names[1]]] * (len(call.inputs) - 1)], [names])


@rule("batch_norm", "_native_batch_norm_legit_functional", "aten._native_batch_norm_legit.no_stats")
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


@rule("renorm")
def renorm(call: OpCall) -> Rule:
    """Each slice along a dim is scaled by its own norm."""
    return through(call, set(range(len(call.shape))) - {call.dim()})
