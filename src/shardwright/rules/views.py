"""Ops that only move elements: views, slices, rows of sections. All linear in what they move."""

from __future__ import annotations

from collections.abc import Sequence

from .dims import blocked, label_dims, through, write_rule
from .notation import Rule, parse
from .registry import OpCall, rule


def regroup(source: Sequence[int], target: Sequence[int]) -> Rule:
    """The rule of a reshape: walk both shapes from the outside, naming what they share.

    A clash (6 x 4 into 8 x 3) stays in its run of equal product and is not splittable.
    """
    sizes: dict[str, int] = {}
    left: list[list[str]] = [[] for _ in source]
    right: list[list[str]] = [[] for _ in target]
    a, b = list(source), list(target)
    i = j = 0

    def label(size: int, blocked: bool = False) -> str:
        name = f"x{len(sizes)}"
        sizes[name] = size
        return name + ("^" if blocked else "")

    while i < len(a) and j < len(b):
        if a[i] == 1:
            i += 1
        elif b[j] == 1:
            j += 1
        elif a[i] % b[j] == 0 or b[j] % a[i] == 0:
            size = min(a[i], b[j])
            name = label(size)
            left[i].append(name)
            right[j].append(name)
            a[i] //= size
            b[j] //= size
        else:
            done_a, done_b = 1, 1
            while True:  # what is left of this run is blocked, on both sides
                if done_a <= done_b and i < len(a):
                    left[i].append(label(a[i], True))
                    done_a, a[i] = done_a * a[i], 1
                    i += 1
                else:
                    right[j].append(label(b[j], True))
                    done_b, b[j] = done_b * b[j], 1
                    j += 1
                if done_a == done_b:
                    break
    text = f"{_dims(left)} ~1 -> {_dims(right)}"
    return parse(text).with_sizes(sizes)


def _dims(groups: Sequence[Sequence[str]]) -> str:
    return " ".join("1" if not group else group[0] if len(group) == 1 else f"({' '.join(group)})" for group in groups)


@rule(
    "view", "reshape", "_unsafe_view", "aten.flatten.using_ints", "aten.unflatten.int", "aten.squeeze.dim",
    "aten.squeeze.dims", "unsqueeze", "_reshape_copy", "view_copy", "unsqueeze_copy",
)  # fmt: skip
def reshape(call: OpCall) -> Rule | None:
    if 0 in call.shape:
        return None
    return regroup(call.shape, call.outputs[0].shape)


def _permuted(names: Sequence[str], order: Sequence[int]) -> Rule:
    return parse(f"{' '.join(names)} ~1 -> {' '.join(names[dim] for dim in order)}")


@rule("permute")
def permute(call: OpCall) -> Rule:
    return _permuted(label_dims(call.shape), call.dims("dims"))


@rule("aten.transpose.int", "t")
def transpose(call: OpCall) -> Rule:
    order = list(range(len(call.shape)))
    if len(order) > 1:
        first = call.dim("dim0", -2)
        two = call.dim("dim1", -1)
        order[first], order[two] = order[two], order[first]
    return _permuted(label_dims(call.shape), order)


@rule("flip", "roll", "rot90", "fliplr", "flipud")
def turned(call: OpCall) -> Rule | None:
    """Dims that are turned know where they are; the others may be split."""
    kind = call.op.target.split(".")[1]
    dims = {"fliplr": {1}, "flipud": {0}}.get(kind) or set(call.dims("dims"))
    if kind == "rot90" and call.op.argument("k", 1) % 2:
        return _quarter(call)
    return through(call, dims, linear=True)


def _quarter(call: OpCall) -> Rule:
    """A quarter turn: two dims change places."""
    first, second = call.dims("dims") if call.op.argument("dims") is not None else (0, 1)
    names = label_dims(call.shape)
    names[first], names[second] = blocked(names[first]), blocked(names[second])
    result = list(names)
    result[first], result[second] = names[second], names[first]
    return write_rule([names], [result], [1])


@rule("expand", "expand_copy", "broadcast_to")
def expand(call: OpCall) -> Rule:
    """A dim that grows from 1 is a label that the input lacks."""
    out = call.outputs[0].shape
    names = label_dims(out)
    shown = names[len(out) - len(call.shape) :]
    source = [name if size != 1 else "1" for name, size in zip(shown, call.shape, strict=True)]
    return write_rule([source], [names], [1])


@rule("repeat", "tile")
def repeat(call: OpCall) -> Rule:
    """Copies side by side: the dim is (copies^, dim); a new or stretched dim can't be split."""
    out = call.outputs[0].shape
    pad = len(out) - len(call.shape)
    source = label_dims(call.shape)
    result, sizes = ["1" if size == 1 else str(size) for size in out[:pad]], {}
    for at, (name, before, after) in enumerate(zip(source, call.shape, out[pad:], strict=True)):
        if before == after:
            result.append(name)
        elif before == 1:
            result.append(str(after))
        else:
            result.append(f"({after // before} {name})")
            sizes[source[at]] = before
    return parse(f"{' '.join(source)} ~1 -> {' '.join(result)}").with_sizes(sizes)


@rule("aten.repeat_interleave.self_int")
def repeat_interleave(call: OpCall) -> Rule | None:
    """Copies next to each other: the dim becomes (dim, copies^), as grouped heads do."""
    repeats, names = call.op.argument("repeats"), label_dims(call.shape)
    if call.op.argument("dim") is None or repeats < 2:
        return None
    dim, result = call.dim(), list(names)
    result[dim] = str(repeats) if names[dim] == "1" else f"({names[dim]} {repeats})"
    return parse(f"{' '.join(names)} ~1 -> {' '.join(result)}").with_sizes({names[dim]: call.shape[dim]})


@rule("aten.select.int")
def select(call: OpCall) -> Rule:
    dim, names = call.dim(), label_dims(call.shape)
    kept = [name for at, name in enumerate(names) if at != dim]
    names[dim] = "1" if names[dim] == "1" else f"{names[dim]}^"
    return parse(f"{' '.join(names)} ~1 -> {' '.join(kept)}")


@rule("aten.slice.Tensor")
def slice_(call: OpCall) -> Rule:
    """A slice that is one of n equal parts goes through (n, part): rotary halves. Others are blocked."""
    dim, names = call.dim(), label_dims(call.shape)
    before, after = call.shape[dim], call.outputs[0].shape[dim]
    source, result, sizes = list(names), list(names), {}
    if before != after:
        start = call.op.argument("start", 0) or 0
        start = start + before if start < 0 else start
        equal = after > 1 and before % after == 0 and start % after == 0 and call.op.argument("step", 1) == 1
        if equal:
            source[dim], result[dim] = f"({before // after} {names[dim]})", names[dim]
            sizes[names[dim]] = after
        else:
            source[dim], result[dim] = str(before), str(after)
    return parse(f"{' '.join(source)} ~1 -> {' '.join(result)}").with_sizes(sizes)


@rule("aten.split.Tensor", "split_with_sizes")
def split(call: OpCall) -> Rule:
    """Equal parts are a product, unequal ones a row of sections."""
    dim, names = call.dim(), label_dims(call.shape)
    parts = [value.shape[dim] for value in call.outputs]
    if len(parts) == 1:
        return parse(f"{' '.join(names)} ~1 -> {' '.join(names)}")
    equal = len(set(parts)) == 1
    inner = ["p"] * len(parts) if equal else [f"p{at}" for at in range(len(parts))]
    shown = [name if size != 1 else "1" for name, size in zip(inner, parts, strict=True)]
    source = [*names]
    source[dim] = f"({len(parts)} p)" if equal else f"({' | '.join(shown)})"
    if equal and parts[0] == 1:
        source[dim] = str(len(parts))
    outputs = [" ".join([*names[:dim], name, *names[dim + 1 :]]) for name in shown]
    return parse(f"{' '.join(source)} ~1 -> {', '.join(outputs)}").with_sizes(dict(zip(inner, parts, strict=True)))


@rule("aten.unbind.int")
def unbind(call: OpCall) -> Rule:
    dim, names = call.dim(), label_dims(call.shape)
    kept = " ".join(name for at, name in enumerate(names) if at != dim)
    names[dim] = "1" if names[dim] == "1" else f"{names[dim]}^"
    return parse(f"{' '.join(names)} ~1 -> {', '.join([kept] * len(call.outputs))}")


@rule("cat", "aten.concat.default")
def cat(call: OpCall) -> Rule:
    out = call.outputs[0].shape
    dim, names = call.dim("dim", 0, rank=len(out)), label_dims(out)
    parts = [value.shape[dim] if len(value.shape) == len(out) else 0 for value in call.inputs]
    if len(parts) == 1 or 0 in parts:
        return parse(f"{', '.join(['?'] * len(parts))} -> {' '.join(str(size) for size in out)}")
    equal = len(set(parts)) == 1
    inner = ["p" if equal else f"p{at}" for at in range(len(parts))]
    shown = [name if size != 1 else "1" for name, size in zip(inner, parts, strict=True)]
    inputs = [" ".join([*names[:dim], name, *names[dim + 1 :]]) + " ~1" for name in shown]
    joined = str(len(parts)) if equal and parts[0] == 1 else f"({len(parts)} p)" if equal else f"({' | '.join(shown)})"
    result = " ".join([*names[:dim], joined, *names[dim + 1 :]])
    return parse(f"{', '.join(inputs)} -> {result}").with_sizes(dict(zip(inner, parts, strict=True)))


@rule("stack")
def stack(call: OpCall) -> Rule:
    dim, names = call.dim("dim", 0, rank=len(call.shape) + 1), label_dims(call.shape)
    result = [*names[:dim], str(len(call.inputs)), *names[dim:]]
    return parse(f"{', '.join([' '.join(names) + ' ~1'] * len(call.inputs))} -> {' '.join(result)}")


@rule("constant_pad_nd", "pad")
def pad(call: OpCall) -> Rule:
    """Padded dims know where they end; the others may be split. Linear unless a number is put in."""
    widths = call.op.argument("pad", ())
    touched = {len(call.shape) - 1 - at // 2 for at, width in enumerate(widths) if width}
    return through(call, touched, linear=not call.op.argument("value", 0))


@rule("tril", "triu")
def triangle(call: OpCall) -> Rule:
    """The last two dims know where they are."""
    return through(call, range(len(call.shape) - 2, len(call.shape)), linear=True)


@rule("unfold", "unfold_copy")
def unfold(call: OpCall) -> Rule:
    """Windows along a dim: it becomes their number, and a new last dim holds what is in them.

    Windows side by side (step = size) are a product of the two.
    """
    dim, names = call.dim("dimension"), label_dims(call.shape)
    size, step = call.op.argument("size"), call.op.argument("step")
    count = call.outputs[0].shape[dim]
    if step == size and count * size == call.shape[dim] and count > 1:
        source = [*names[:dim], f"(win {size})" if size > 1 else "win", *names[dim + 1 :]]
        return write_rule([source], [[*names[:dim], "win", *names[dim + 1 :], str(size)]], [1]).with_sizes(
            {"win": count}
        )
    source = [*names[:dim], str(call.shape[dim]), *names[dim + 1 :]]
    return write_rule([source], [[*names[:dim], str(count), *names[dim + 1 :], str(size)]], [1])


@rule("slice_scatter", "select_scatter")
def scatter_slice(call: OpCall) -> Rule:
    """A slice replaced by another tensor: the dim that is sliced stays whole."""
    dim, names = call.dim(), label_dims(call.shape)
    source = [blocked(name) if at == dim else name for at, name in enumerate(names)]
    kept = call.inputs[1].shape
    if "select" in call.op.target:
        return write_rule([source, [*names[:dim], *names[dim + 1 :]]], [names], [1, 1])
    return write_rule([source, [*names[:dim], str(kept[dim]), *names[dim + 1 :]]], [names], [1, 1])
