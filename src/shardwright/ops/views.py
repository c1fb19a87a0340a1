"""Views: ops that show the elements of a tensor in another shape or order. All linear in what they show."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir import Op
from ..rules.dims import label_dims, write_rule
from ..rules.notation import Rule, parse
from ..rules.registry import OpCall
from . import strides
from .contexts import ProgramOnRank, TracedCall, ViewWrite
from .localizing import local_size
from .pointwise import CAST, PASSED_ON, canonical_identity, canonical_restride, cast, linear_unary
from .printing import Printing, dims_method, method
from .spec import Kernel, define, spec_of

VIEW = {"kernel": Kernel.VIEW, "saved": "", "back": "pass", "result": "0"}
"""A view whose backward is a view."""

# -- rules


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


def reshape(call: OpCall) -> Rule | None:
    if 0 in call.shape:
        return None
    return regroup(call.shape, call.outputs[0].shape)


def _permuted(names: Sequence[str], order: Sequence[int]) -> Rule:
    return parse(f"{' '.join(names)} ~1 -> {' '.join(names[dim] for dim in order)}")


def permute(call: OpCall) -> Rule:
    return _permuted(label_dims(call.shape), call.dims("dims"))


def transpose(call: OpCall) -> Rule:
    order = list(range(len(call.shape)))
    if len(order) > 1:
        first = call.dim("dim0", -2)
        two = call.dim("dim1", -1)
        order[first], order[two] = order[two], order[first]
    return _permuted(label_dims(call.shape), order)


def expand(call: OpCall) -> Rule:
    """A dim that grows from 1 is a label that the input lacks."""
    out = call.outputs[0].shape
    names = label_dims(out)
    shown = names[len(out) - len(call.shape) :]
    source = [name if size != 1 else "1" for name, size in zip(shown, call.shape, strict=True)]
    return write_rule([source], [names], [1])


def complex_view(call: OpCall) -> Rule:
    """A last dim of two is the number's own."""
    real = "as_real" in call.op.target
    names = label_dims(call.shape if real else call.outputs[0].shape)
    return write_rule([names if real else [*names, "2"]], [[*names, "2"] if real else names], [1])


# -- canonical forms


def canonical_reshape(call: TracedCall) -> list[str]:
    if call.input_info.shape == call.info.shape:
        return call.identity(call.first)
    if call.target == "aten.view.default" and not call.is_loose(call.first):
        return call.emit(self=call.first, size=call.info.shape)
    return call.emit("aten.reshape.default", self=call.first, shape=call.info.shape)


def canonical_expand(call: TracedCall) -> list[str]:
    if call.input_info.shape == call.info.shape:
        return call.identity(call.first)
    return call.emit("aten.expand.default", self=call.first, size=call.info.shape)


def canonical_broadcast(call: TracedCall) -> list[str]:
    """One expand for each tensor: values of one op share their gradient flag, these must not."""
    names = []
    for index, (ref, info) in enumerate(zip(call.arguments["tensors"], call.infos, strict=True)):
        if call.target.startswith("aten.meshgrid"):
            swapped = call.arguments.get("indexing", "ij") == "xy" and len(call.infos) > 1 and index < 2
            dim = 1 - index if swapped else index
            shape = tuple(size if at == dim else 1 for at, size in enumerate(info.shape))
            source = call.describe(shape, call.info_of(ref).dtype)
            ref = call.reference(call.write("aten.reshape.default", {"self": ref}, [source])[0])
        names += call.write("aten.expand.default", {"self": ref}, [info])
    return names


def canonical_detach(call: TracedCall) -> list[str]:
    if not call.input_info.gradient:
        return call.identity(call.first)
    return call.emit("aten.detach.default", self=call.first)


def canonical_squeeze(call: TracedCall) -> list[str]:
    if call.input_info.shape == call.info.shape:
        return call.identity(call.first)
    if "dim" not in call.arguments:
        return canonical_reshape(call)
    dims, shape = call.arguments["dim"], call.input_info.shape
    if isinstance(dims, int):
        return call.keep()
    # a shard of a dim may have one element, which must not be dropped then
    dropped = tuple(dim for dim in dims if shape[dim] == 1)
    return call.emit(call.target, self=call.first, dim=dropped)


def canonical_transpose(call: TracedCall) -> list[str]:
    rank = len(call.input_info.shape)
    if rank == 0 or (call.target.split(".")[1] in ("t", "numpy_T") and rank < 2):
        return call.identity(call.first)
    if call.target == "aten.numpy_T.default" and rank > 2:
        return call.emit("aten.permute.default", self=call.first, dims=tuple(reversed(range(rank))))
    named_dims = [call.arguments.get(name) for name in ("dim0", "dim1", "axis0", "axis1")]
    dims = [dim % rank for dim in named_dims if dim is not None] or [rank - 2, rank - 1]
    if dims[0] == dims[1]:
        return call.identity(call.first)
    return call.emit("aten.transpose.int", self=call.first, dim0=dims[0], dim1=dims[1])


def canonical_permute(call: TracedCall) -> list[str]:
    rank = len(call.input_info.shape)
    if [dim % rank for dim in call.arguments["dims"]] == list(range(rank)):
        return call.identity(call.first)
    return call.keep()


def canonical_movedim(call: TracedCall) -> list[str]:
    rank = len(call.input_info.shape)
    if rank == 0:
        return call.identity(call.first)
    source, target = call.arguments["source"], call.arguments["destination"]
    pairs = zip(source, target, strict=True) if isinstance(source, tuple) else [(source, target)]
    moved = {new % rank: old % rank for old, new in pairs}
    rest = iter(dim for dim in range(rank) if dim not in moved.values())
    dims = tuple(moved[dim] if dim in moved else next(rest) for dim in range(rank))
    return call.emit("aten.permute.default", self=call.first, dims=dims)


def canonical_as_strided(call: TracedCall) -> list[str]:
    """Places in memory are places in the order of the elements, where memory is in order (convert.py refuses the rest).

    Said so, it does not matter where and how a value lies here, on one device or on many.
    """
    size, strides = call.arguments["size"], call.arguments["stride"]
    places = call.element_numbers(size, strides, call.arguments.get("storage_offset") or 0)
    return call.emit("aten.take.default", self=call.first, index=places)


def canonical_as_strided_scatter(call: TracedCall) -> list[str]:
    remedy = "Use slice_scatter, index_put or torch.where."
    raise call.unsupported("as_strided_scatter writes by places in memory, which values don't have", remedy)


# -- writes through a view


def write_reshaped(write: ViewWrite) -> str:
    if write.new_shape == write.shape:
        return write.as_it_is
    return write.emit("aten.reshape.default", self=write.new, shape=write.shape)


def write_self_inverse(write: ViewWrite) -> str:
    return write.emit(write.target, self=write.new, **write.options)


def write_permuted(write: ViewWrite) -> str:
    dims = [dim % len(write.shape) for dim in write.options["dims"]]
    inverse = tuple(dims.index(dim) for dim in range(len(dims)))
    return write.emit("aten.permute.default", self=write.new, dims=inverse)


def write_strided(write: ViewWrite) -> str:
    size, steps = write.options["size"], write.options["stride"]
    numbers = write.element_numbers(size, steps, write.options.get("storage_offset") or 0)
    return write.emit("aten.put.default", self=write.parent, index=numbers, source=write.new)


# -- on a rank, and in generated code


def local_unflatten(program: ProgramOnRank, op: Op) -> Op:
    dim = op.argument("dim", 0) % len(program.values[op.inputs[0]].shape)
    return op.with_arguments(sizes=program.sizes_of(op.outputs[0])[dim : dim + len(op.argument("sizes"))])


def print_view(p: Printing) -> str:
    key = "size" if p.has("size") else "shape"
    name = {"_unsafe_view": "view"}.get(p.op.target.split(".")[1], p.op.target.split(".")[1])
    return f"{p.first()}.{name}({p.listed(key) or '()'})"


def follows_view(view: Op, op: Op) -> bool:
    """Whether an op can stand behind a view that nothing else reads, in one line: `x.view(b, s, d).transpose(1, 2)`.

    Both are methods of what they show and share its memory, and the user has them on one line too.
    """
    first, second = spec_of(view.target), spec_of(op.target)
    return (
        first.chains and second.chains and len(view.outputs) == 1 and op.inputs == view.outputs
        and view.source == op.source
    )  # fmt: skip


# -- definitions

RESHAPE = {"canonical": canonical_reshape, "view": strides.reshaped, "write_back": write_reshaped, **VIEW}
SIZED = {"rule": reshape, "localize": local_size, "prints": print_view, "chains": True}
define("reshape", reads="x.reshape(*shape)", may_copy=True, **RESHAPE, **SIZED)
define("_unsafe_view", reads="x.view(*size)", **RESHAPE, **SIZED)
define("view", reads="x.view(*size)", **{**RESHAPE, "canonical": {"default": canonical_reshape}}, **SIZED)
define("_reshape_copy view_copy", rule=reshape, localize=local_size)
define("flatten", rule={"using_ints": reshape}, **RESHAPE)
define("unflatten", rule={"int": reshape}, localize=local_unflatten, **RESHAPE)
define("reshape_as view_as", **RESHAPE)
define("unsqueeze", rule=reshape, view=strides.unsqueezed, write_back=write_reshaped,
       prints=dims_method("unsqueeze", "dim"), reads="x.unsqueeze(dim)", chains=True, **VIEW)  # fmt: skip
define("unsqueeze_copy", rule=reshape)
define("squeeze", rule={"dim dims": reshape}, canonical=canonical_squeeze, view=strides.squeezed,
       write_back=write_reshaped, prints=dims_method("squeeze", "dim"), reads="x.squeeze(*dim)",
       chains=True, **VIEW)  # fmt: skip

TURNED = {"canonical": canonical_transpose, "view": strides.swapped, "write_back": write_self_inverse, **VIEW}
define("transpose", rule={"int": transpose}, turns=True, prints=dims_method("transpose", "dim0", "dim1"),
       reads="x.transpose(dim0, dim1)", chains=True, **TURNED)  # fmt: skip
define("t", rule=transpose, turns=True, prints=method, chains=True, **TURNED)
define("swapaxes swapdims mT numpy_T", **TURNED)
define("adjoint matrix_H", canonical=canonical_transpose, **VIEW)
define("permute", rule=permute, canonical=canonical_permute, view=strides.permuted, write_back=write_permuted,
       turns=True, prints=dims_method("permute", "dims"), reads="x.permute(*dims)", chains=True, **VIEW)  # fmt: skip
define("movedim moveaxis", canonical=canonical_movedim, view=strides.as_it_is, **VIEW)

STRETCH = {"canonical": canonical_expand, "view": strides.expanded, **VIEW, "back": "fresh"}
define("expand", rule=expand, localize=local_size, prints=print_view, reads="x.expand(*size)", chains=True, **STRETCH)
define("broadcast_to", rule=expand, localize=local_size, **STRETCH)
define("expand_as", **STRETCH)
define("expand_copy", rule=expand, localize=local_size, kernel=Kernel.VIEW)
define("broadcast_tensors", canonical=canonical_broadcast, returns_list=True, reads="torch.broadcast_tensors(*tensors)",
       prints=lambda p: f"torch.broadcast_tensors({p.listed('tensors')})")  # fmt: skip
define("meshgrid", canonical=canonical_broadcast, returns_list=True)

SAME = {"rule": linear_unary, "keeps_order": True, "view": strides.as_it_is, **VIEW}
define("detach", canonical=canonical_detach, write_back=write_reshaped, gradient="none", prints=method, **SAME)
define("detach_", canonical=canonical_detach, write_back=write_reshaped, gradient="none")
define("alias", canonical=canonical_identity, write_back=write_reshaped, **SAME)
define("positive", canonical=canonical_identity, **SAME)
define("lift_fresh", canonical=canonical_identity, view=strides.as_it_is, **VIEW)
define("contiguous", canonical=canonical_restride, write_back=write_reshaped, prints=method, passes=PASSED_ON,
       **{**SAME, "view": strides.if_contiguous, "kernel": Kernel.POINTWISE})  # fmt: skip
define("to", rule={"dtype": cast}, write_back=write_reshaped, **CAST)
define("type_as", rule=cast, write_back=write_reshaped, **CAST)
define("real imag", **{**SAME, "back": "fresh"})
define("conj", kernel=Kernel.VIEW)
define("view_as_complex view_as_real", rule=complex_view, view=strides.as_it_is, **VIEW)
define("view_as_real_copy", rule=complex_view)
define("as_strided", canonical=canonical_as_strided, write_back=write_strided)
define("as_strided_copy", canonical=canonical_as_strided)
define("as_strided_scatter", canonical=canonical_as_strided_scatter)
