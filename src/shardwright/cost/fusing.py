"""What lowering makes of steps that stand next to each other: fewer of them, and fewer tensors.

The same as `lower/passes.py`, as far as memory goes: biases folded into their matmuls, sums in
place, and products joined with the converter before them.
"""

from __future__ import annotations

from ..ops import OpSpec, spec_of, target_of
from .flow import GradientFlow
from .rank_program import RankProgram, RankStep, RankTensor


def fuse(program: RankProgram) -> RankProgram:
    """The steps as they run."""
    _fold_biases(program)
    _sum_in_place(program)
    _join_products(program)
    return program


def _readers(program: RankProgram) -> dict[int, list[RankStep]]:
    readers: dict[int, list[RankStep]] = {}
    for step in program.steps:
        for number in dict.fromkeys(step.inputs):
            readers.setdefault(number, []).append(step)
    for number in program.outputs:
        readers.setdefault(number, []).append(_OUTSIDE)
    return readers


def _spec(step: RankStep) -> OpSpec:
    """What is known of the op of a step."""
    return spec_of(target_of(step.kind))


_OUTSIDE = RankStep("", "", [], [], [], [])


def _fold_biases(program: RankProgram) -> None:
    """A matmul and the bias added right after it are one call."""
    readers = _readers(program)
    producer = {number: step for step in program.steps for number in step.outputs}
    gone: set[int] = set()
    for step in program.steps:
        if step.kind != "add" or len(step.inputs) != 2:
            continue
        product = producer.get(step.inputs[0])
        bias = program.tensors[step.inputs[1]]
        view = producer.get(step.inputs[1])
        persistent = bias.parameter is not None or (
            view is not None
            and (view.shares or view.kind == "_to_copy")
            and program.tensors[view.inputs[0]].parameter is not None
        )
        if product is None or not _spec(product).folds_bias or not persistent or product.region != step.region:
            continue
        if readers[step.inputs[0]] != [step] or len(product.inputs) != 2:
            continue
        product.inputs.append(step.inputs[1])
        product.back.append(step.back[1])
        product.outputs = step.outputs
        gone.add(id(step))
    program.steps = [step for step in program.steps if id(step) not in gone]


def _sum_in_place(program: RankProgram) -> None:
    """A pending sum that only its reshard reads is reduced in place."""
    readers = _readers(program)
    producer = {number: step for step in program.steps for number in step.outputs}
    for step in program.steps:
        maker = producer.get(step.inputs[0]) if step.inputs else None
        if step.kind == "all_reduce" and maker is not None and _spec(maker).fresh:
            step.shares = readers[step.inputs[0]] == [step]


def _join_products(program: RankProgram) -> None:
    """A value whose gradient is to be summed, and the matmuls that alone read it, are one call."""
    readers = _readers(program)
    joined: dict[int, RankStep] = {}
    gone: set[int] = set()
    tensors = program.tensors
    for step in program.steps:
        if step.kind not in ("replicate", "all_gather_to_r") or not step.gradient:
            continue
        layers = readers.get(step.outputs[0], [])
        if not layers or any(not _is_layer(layer, step.outputs[0], tensors) for layer in layers):
            continue
        if len({layer.region for layer in layers}) > 1:
            continue
        large = tensors[step.outputs[0]].bytes
        weights = [number for layer in layers for number in layer.inputs[1:]]
        back = [how for layer in layers for how in layer.back[1:]]
        gathers = step.kind == "all_gather_to_r"
        of_weights = sum(tensors[n].bytes for n, how in zip(weights, back, strict=True) if how is GradientFlow.FRESH)
        whole_bytes = max(large + step.backward_work - of_weights, large) if gathers else 0.0
        joined[id(layers[0])] = RankStep(
            name=layers[0].name,
            kind="linear",
            inputs=[step.inputs[0], *weights],
            outputs=[number for layer in layers for number in layer.outputs],
            back=[GradientFlow.FRESH, *back],
            saved=[*([] if gathers else [step.inputs[0]]), *weights],
            extra=large if gathers else 0.0,
            work=step.work if gathers else 0.0,
            backward_work=whole_bytes,
            region=layers[0].region,
            scope=layers[0].scope,
        )
        gone.update((id(step), *(id(layer) for layer in layers[1:])))
    program.steps = [joined.get(id(step), step) for step in program.steps if id(step) not in gone]


def _is_layer(step: RankStep, x: int, tensors: list[RankTensor]) -> bool:
    if step.kind != "linear" or not step.gradient or step.inputs[0] != x:
        return False
    return all(tensors[number].parameter is not None for number in step.inputs[1:])
