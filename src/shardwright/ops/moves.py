"""Tensors put together, repeated, padded, turned. All linear in what they move."""

from __future__ import annotations

from ..rules.dims import blocked, label_dims, through, write_rule
from ..rules.notation import Rule, parse
from ..rules.registry import OpCall
from .contexts import TracedCall, ValueFacts
from .pointwise import GRADIENT_ONLY
from .printing import Printing, function, listed_call
from .spec import Kernel, define


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


def stack(call: OpCall) -> Rule:
    dim, names = call.dim("dim", 0, rank=len(call.shape) + 1), label_dims(call.shape)
    result = [*names[:dim], str(len(call.inputs)), *names[dim:]]
    return parse(f"{', '.join([' '.join(names) + ' ~1'] * len(call.inputs))} -> {' '.join(result)}")


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


def repeat_interleave(call: OpCall) -> Rule | None:
    """Copies next to each other: the dim becomes (dim, copies^), as grouped heads do."""
    repeats, names = call.op.argument("repeats"), label_dims(call.shape)
    if call.op.argument("dim") is None or repeats < 2:
        return None
    dim, result = call.dim(), list(names)
    result[dim] = str(repeats) if names[dim] == "1" else f"({names[dim]} {repeats})"
    return parse(f"{' '.join(names)} ~1 -> {' '.join(result)}").with_sizes({names[dim]: call.shape[dim]})


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


def pad(call: OpCall) -> Rule:
    """Padded dims know where they end; the others may be split. Linear unless a number is put in."""
    widths = call.op.argument("pad", ())
    touched = {len(call.shape) - 1 - at // 2 for at, width in enumerate(widths) if width}
    return through(call, touched, linear=not call.op.argument("value", 0))


def triangle(call: OpCall) -> Rule:
    """The last two dims know where they are."""
    return through(call, range(len(call.shape) - 2, len(call.shape)), linear=True)


def diag_embed(call: OpCall) -> Rule:
    rank = len(call.shape) + 1
    new = {call.dim("dim1", -2, rank), call.dim("dim2", -1, rank)}
    names = label_dims(call.shape)
    rest = iter(names[:-1])
    result = [str(size) if at in new else next(rest) for at, size in enumerate(call.outputs[0].shape)]
    return write_rule([[*names[:-1], str(call.shape[-1])]], [result], [1])


def canonical_cat(call: TracedCall) -> list[str]:
    """What is empty adds nothing: an HF cache starts so, and so does what a rotary embedding leaves alone."""
    dim = call.arguments.get("dim", 0)
    infos = {ref: call.info_of(ref) for ref in call.arguments["tensors"]}
    empty = {ref for ref, info in infos.items() if (info.shape == (0,) or info.shape[dim] == 0) and not info.gradient}
    tensors = tuple(ref for ref in call.arguments["tensors"] if ref not in empty)
    if len(tensors) == 1 and _alike(infos[tensors[0]], call.info):
        call.loosen(tensors[0])
        return call.identity(tensors[0])
    return call.emit("aten.cat.default", tensors=tensors or call.arguments["tensors"], dim=dim)


def _alike(first: ValueFacts, other: ValueFacts) -> bool:
    return (first.shape, first.dtype) == (other.shape, other.dtype)


def canonical_repeat_interleave(call: TracedCall) -> list[str]:
    """Without the size of the result: it is only a hint, and would be another one on each rank."""
    return call.emit(**{name: value for name, value in call.arguments.items() if name != "output_size"})


def print_pad(p: Printing) -> str:
    value = p.literal("value")
    usual = value is None or (not value and "constant" in p.op.target)  # 0.0 is not what `pad` has by default
    return f"F.pad({p.first()}, {p['pad']}{'' if usual else f', value={p.show(value)}'})"


JOIN = {"kernel": Kernel.JOIN, "saved": "", "back": "pass"}
define("cat", rule=cat, canonical=canonical_cat, prints=listed_call("cat"), reads="torch.cat(tensors, dim)",
       defaults={"dim": 0}, **JOIN)  # fmt: skip
define("concat", rule=cat, canonical=canonical_cat, **JOIN)
define("concatenate", canonical=canonical_cat, **JOIN)
define("stack", rule=stack, prints=listed_call("stack"), reads="torch.stack(tensors, dim)", defaults={"dim": 0}, **JOIN)
define("hstack vstack", **JOIN)

MOVED = {"saved": "", "passes": GRADIENT_ONLY}
PAD = {"rule": pad, "prints": print_pad, "reads": "F.pad(self, pad, value)", "positional": 2, **MOVED}
define("pad", defaults={"mode": "constant", "value": 0}, **PAD)
define("constant_pad_nd", defaults={"value": 0}, **PAD)
define("repeat tile", rule=repeat, **MOVED)
define("repeat_interleave", rule={"self_int": repeat_interleave}, canonical=canonical_repeat_interleave,
       prints=function, **MOVED)  # fmt: skip
define("flip roll", rule=turned, prints=function, **MOVED)
define("rot90", rule=turned, saved="")
define("fliplr flipud", rule=turned)
define("tril triu", rule=triangle, prints=function, saved="")
define("diag_embed", rule=diag_embed, saved="")
