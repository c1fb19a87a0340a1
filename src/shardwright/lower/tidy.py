"""Passes that make the program shorter: constants out of the way, biases back in."""

from __future__ import annotations

from dataclasses import replace

from ..ir import Op
from ..ir.graph import Slot
from ..layout import MB
from ..ops import Kernel, spec_of
from ..ops.losses import COUNTED
from .program import LoweredProgram

SHARES = ("comm.shard", "comm.shard_from_r")


def relax_layouts(program: LoweredProgram) -> LoweredProgram:
    """This rank's share of a value has the strides of the reduced, so that a view of it has to be a reshape.

    So has what was joined along an inner dim, and what ops make that keep to the order of what they read.
    """
    loose: set[str] = set()
    body = []
    for op in program.body:
        joined = op.target.startswith("comm.") and any(op.argument(key) for key in ("dim", "to_dim"))
        if op.target in SHARES or joined:
            loose.update(op.outputs)
        elif any(name in loose for name in op.inputs) and not spec_of(op.target).dense:
            if op.target == "aten.view.default":
                arguments = tuple(("shape" if name == "size" else name, value) for name, value in op.arguments)
                op = replace(op, target="aten.reshape.default", arguments=arguments)
            loose.update(op.outputs)
        body.append(op)
    return program.with_(body=tuple(body))


def fold_mean(program: LoweredProgram) -> LoweredProgram:
    """A mean over counted labels and its sum over the samples' axes become one: loss and count are summed at once."""
    users, needed = program.users(), program.needed()
    makers = {op.outputs[0]: op for op in program.body if op.target in COUNTED}
    joined: dict[str, Op] = {}
    gone: set[str] = set()
    for op in program.body:
        loss = makers.get(op.inputs[0]) if op.target == "comm.all_reduce" else None
        if (
            loss is None
            or loss.argument("count") is not None
            or loss.argument("samples") != op.argument("axes")
            or loss.argument("reduction", 1) != 1
        ):
            continue
        if len(users[op.inputs[0]]) == 1 and op.inputs[0] not in needed:
            joined[loss.name] = replace(loss, outputs=op.outputs).with_arguments(reduced=True)
            gone.add(op.name)
    return program.with_(body=tuple(joined.get(op.name, op) for op in program.body if op.name not in gone))


def hoist(program: LoweredProgram) -> LoweredProgram:
    """What depends on no input, no parameter and no changing buffer is computed once, shards included."""
    fixed = {buffer.value for buffer in program.graph.buffers if buffer.update is None}
    constants: list[Op] = []
    body: list[Op] = []
    for op in program.body:
        own = program.analysis.is_constant(op)
        shard = op.target in SHARES and op.inputs[0] in fixed and MB not in op.argument("axes")
        if (own or shard) and all(name in fixed for name in op.inputs):
            fixed.update(op.outputs)
            constants.append(op)
        else:
            body.append(op)
    return program.with_(constants=tuple(constants), body=tuple(body))


def prune(program: LoweredProgram) -> LoweredProgram:
    """Drop ops whose results nobody reads."""
    wanted = program.needed() | {early.source for early in program.early}
    live: list[Op] = []
    for op in reversed(program.ops):
        if any(name in wanted for name in op.outputs):
            live.append(op)
            wanted.update(op.inputs)
    outputs = {op.outputs for op in live}
    return program.with_(
        constants=tuple(op for op in program.constants if op.outputs in outputs),
        body=tuple(op for op in program.body if op.outputs in outputs),
    )


def fold_bias(program: LoweredProgram) -> LoweredProgram:
    """A matmul or convolution and the bias added right after it become one call again, if nothing stands between."""
    users, needed = program.users(), program.needed()
    producers = {name: op for op in program.body for name in op.outputs}
    replaced: dict[str, Op] = {}
    gone: set[str] = set()
    for op in program.body:
        if op.target != "aten.add.Tensor" or len(op.inputs) != 2 or op.argument("alpha", 1) != 1:
            continue
        product = producers.get(op.inputs[0])
        if product is None or len(product.inputs) != 2 or product.name in replaced:
            continue
        bias, view = op.inputs[1], producers.get(op.inputs[1])
        spec = spec_of(product.target)
        if not spec.folds_bias or not product.target.endswith(".default"):  # padding="same" is another overload
            continue
        spatial = spec.kernel is Kernel.CONVOLUTION
        if spatial and view is not None and view.target in ("aten.view.default", "aten.reshape.default"):
            bias = view.inputs[0]
        elif spatial:
            continue
        if len(program.values[bias].shape) != 1:  # what F.linear and F.conv2d take
            continue
        alone = len(users[op.inputs[0]]) == 1 and op.inputs[0] not in needed
        if (product.no_grad, product.autocast, product.region) != (op.no_grad, op.autocast, op.region):
            continue
        addend, out = program.values[op.inputs[1]], program.values[op.outputs[0]]
        if not (_per_channel(addend.shape, out.shape) if spatial else addend.shape == out.shape[-1:]):
            continue
        if addend.dtype != program.values[op.inputs[0]].dtype:
            continue
        if not alone or program.layouts[op.inputs[0]].rest != program.layouts[op.outputs[0]].rest:
            continue
        replaced[op.name] = _with_bias(product, op, bias)
        gone.add(product.name)
    body = tuple(replaced.get(op.name, op) for op in program.body if op.name not in gone)
    return prune(program.with_(body=body))


def _per_channel(bias: tuple[int, ...], out: tuple[int, ...]) -> bool:
    """Whether a bias of [.., c, 1, 1] is added to channels, and not along space."""
    at = len(bias) - (len(out) - 1)
    return at >= 0 and bias[at] == out[1] and all(size == 1 for dim, size in enumerate(bias) if dim != at)


def _with_bias(product: Op, add: Op, bias: str) -> Op:
    if product.target == "aten.mm.default":
        arguments: tuple[tuple[str, object], ...] = (("self", Slot(2)), ("mat1", Slot(0)), ("mat2", Slot(1)))
        target = "aten.addmm.default"
    else:
        arguments = tuple((k, v) for k, v in product.arguments if k != "bias")
        at = 2
        arguments = (*arguments[:at], ("bias", Slot(2)), *arguments[at:])
        target = product.target
    return replace(
        product,
        target=target,
        inputs=(*product.inputs, bias),
        outputs=add.outputs,
        arguments=arguments,
        source=product.source or add.source,
    )
