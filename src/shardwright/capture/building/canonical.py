"""One spelling for each thing: the many ways in which aten says the same are made one.

`write` is the only door into the draft for traced calls. It looks the call up in a table
of rewritings; each returns the names of the outputs. Identities return their input, so
nothing is left of a cast to the same dtype, a dropout that does nothing, a clone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...ir import Dtype
from ..failure import unsupported
from .graph_builder import GraphBuilder, OpOrigin, ValueInfo, ValueRef
from .strided_access import element_numbers


@dataclass(frozen=True, slots=True)
class AtenCall:
    builder: GraphBuilder
    target: str
    arguments: dict[str, Any]
    infos: Sequence[ValueInfo]
    place: OpOrigin

    @property
    def info(self) -> ValueInfo:
        return self.infos[0]

    @property
    def first(self) -> ValueRef:
        """The tensor that the call is about."""
        for name in ("self", "input"):
            if isinstance(self.arguments.get(name), ValueRef):
                return self.arguments[name]  # type: ignore[no-any-return]
        raise KeyError(f"{self.target} has no self")

    @property
    def input_info(self) -> ValueInfo:
        return self.builder.infos[self.first.name]

    def emit(self, target: str | None = None, kind: str | None = None, /, **arguments: Any) -> list[str]:
        return self.builder.emit(target or self.target, arguments, self.infos, self.place, kind)

    def grads(self, ref: ValueRef) -> bool:
        return self.builder.infos[ref.name].gradient

    def keep(self) -> list[str]:
        return self.emit(**self.arguments)


Rewriting = Callable[[AtenCall], list[str]]
_TABLE: dict[str, Rewriting] = {}


def write(call: AtenCall) -> list[str]:
    """Put a traced call into the draft, in its normal form."""
    kind = call.target.rsplit(".", 1)[0]
    rewriting = _TABLE.get(call.target) or _TABLE.get(kind)
    return rewriting(call) if rewriting else call.keep()


def _for(*kinds: str) -> Callable[[Rewriting], Rewriting]:
    def register(rewriting: Rewriting) -> Rewriting:
        for kind in kinds:
            _TABLE[f"aten.{kind}"] = rewriting
        return rewriting

    return register


@_for("alias", "lift_fresh", "lift_fresh_copy", "positive", "data", "resolve_conj", "resolve_neg")
def _identity(call: AtenCall) -> list[str]:
    return [call.first.name]


@_for("contiguous", "clone")
def _restride(call: AtenCall) -> list[str]:
    """Values have no strides here; a view that relied on these becomes a reshape."""
    call.builder.loose.add(call.first.name)
    return [call.first.name]


@_for("detach", "detach_")
def _detach(call: AtenCall) -> list[str]:
    if not call.input_info.gradient or call.place.no_grad:
        return [call.first.name] if not call.input_info.gradient else call.emit("aten.detach.default", self=call.first)
    return call.emit("aten.detach.default", self=call.first)


@_for("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
def _dropout(call: AtenCall) -> list[str]:
    if call.arguments["p"] == 0 or not call.arguments["train"]:
        return [call.first.name]
    return call.keep()


@_for("to", "_to_copy", "type_as", "_autocast_to_reduced_precision", "_autocast_to_full_precision")
def cast(call: AtenCall) -> list[str]:
    if call.input_info.dtype == call.info.dtype:
        return [call.first.name]
    return call.emit("aten._to_copy.default", self=call.first, dtype=Dtype(call.info.dtype))


@_for("view.default", "_unsafe_view", "reshape", "flatten", "unflatten", "view_as", "reshape_as")
def _reshape(call: AtenCall) -> list[str]:
    if call.input_info.shape == call.info.shape:
        return [call.first.name]
    if call.target == "aten.view.default" and call.first.name not in call.builder.loose:
        return call.emit(self=call.first, size=call.info.shape)
    return call.emit("aten.reshape.default", self=call.first, shape=call.info.shape)


@_for("expand", "expand_as", "broadcast_to")
def _expand(call: AtenCall) -> list[str]:
    if call.input_info.shape == call.info.shape:
        return [call.first.name]
    return call.emit("aten.expand.default", self=call.first, size=call.info.shape)


@_for("broadcast_tensors", "meshgrid")
def _broadcast(call: AtenCall) -> list[str]:
    """One expand for each tensor: values of one op share their gradient flag, these must not."""
    names = []
    for index, (ref, info) in enumerate(zip(call.arguments["tensors"], call.infos, strict=True)):
        source = call.builder.infos[ref.name]
        if call.target.startswith("aten.meshgrid"):
            swapped = call.arguments.get("indexing", "ij") == "xy" and len(call.infos) > 1 and index < 2
            dim = 1 - index if swapped else index
            shape = tuple(size if at == dim else 1 for at, size in enumerate(info.shape))
            source = ValueInfo(shape, source.dtype)
            ref = ValueRef(
                write(AtenCall(call.builder, "aten.reshape.default", {"self": ref}, [source], call.place))[0]
            )
        names += write(AtenCall(call.builder, "aten.expand.default", {"self": ref}, [info], call.place))
    return names


@_for("cat", "concat", "concatenate")
def _cat(call: AtenCall) -> list[str]:
    """What is empty adds nothing: an HF cache starts so, and so does what a rotary embedding leaves alone."""
    dim = call.arguments.get("dim", 0)
    shapes = {ref: call.builder.infos[ref.name].shape for ref in call.arguments["tensors"]}
    empty = {ref for ref, shape in shapes.items() if (shape == (0,) or shape[dim] == 0) and not call.grads(ref)}
    tensors = tuple(ref for ref in call.arguments["tensors"] if ref not in empty)
    if len(tensors) == 1 and call.builder.infos[tensors[0].name] == replace(call.info, gradient=call.grads(tensors[0])):
        return _restride(replace(call, arguments={"self": tensors[0]}))
    return call.emit("aten.cat.default", tensors=tensors or call.arguments["tensors"], dim=call.arguments.get("dim", 0))


@_for("mul.Tensor", "div.Tensor", "add.Tensor", "sub.Tensor")
def _arithmetic(call: AtenCall) -> list[str]:
    """Times one and plus zero, where they also leave dtype and shape alone."""
    other = call.arguments.get("other")
    neutral = 1 if call.target in ("aten.mul.Tensor", "aten.div.Tensor") else 0
    same = isinstance(call.arguments["self"], ValueRef) and (call.input_info.shape, call.input_info.dtype) == (
        call.info.shape,
        call.info.dtype,
    )
    exact = neutral == 1 or not call.info.floating
    if same and exact and not isinstance(other, ValueRef | bool) and other == neutral:
        return [call.first.name]
    return call.keep()


@_for("as_strided_scatter")
def _as_strided_scatter(call: AtenCall) -> list[str]:
    remedy = "Use slice_scatter, index_put or torch.where."
    what = "as_strided_scatter writes by places in memory, which values don't have"
    raise unsupported(what, call.place.source, remedy)


@_for("as_strided", "as_strided_copy")
def _as_strided(call: AtenCall) -> list[str]:
    """Places in memory are places in the order of the elements, where memory is in order (convert.py refuses the rest).

    Said so, it does not matter where and how a value lies here, on one device or on many.
    """
    size, strides = call.arguments["size"], call.arguments["stride"]
    places = element_numbers(call.builder, size, strides, call.arguments.get("storage_offset") or 0, call.place)
    return call.emit("aten.take.default", self=call.first, index=places)


@_for("cross")
def _cross(call: AtenCall) -> list[str]:
    """Without a dim it is the first of size 3, which on a piece might be another one."""
    if call.arguments.get("dim") is not None:
        return call.keep()
    return call.emit(**call.arguments | {"dim": call.info.shape.index(3)})


@_for("repeat_interleave")
def _repeat_interleave(call: AtenCall) -> list[str]:
    """Without the size of the result: it is only a hint, and would be another one on each rank."""
    return call.emit(**{name: value for name, value in call.arguments.items() if name != "output_size"})


@_for("squeeze")
def _squeeze(call: AtenCall) -> list[str]:
    if call.input_info.shape == call.info.shape:
        return [call.first.name]
    return call.keep() if "dim" in call.arguments else _reshape(call)


@_for("slice", "narrow")
def _slice(call: AtenCall) -> list[str]:
    bounds = slice_bounds(call.arguments, call.input_info.shape)
    size = call.input_info.shape[bounds["dim"]]
    if bounds == {"dim": bounds["dim"], "start": 0, "end": size}:
        return [call.first.name]
    return call.emit("aten.slice.Tensor", self=call.first, **bounds)


def slice_bounds(arguments: dict[str, Any], shape: Sequence[int]) -> dict[str, int]:
    """dim, start, end (and step) of a slice as plain indices, whatever way they were given."""
    dim = arguments.get("dim", 0) % len(shape)
    size, step = shape[dim], arguments.get("step", 1)
    start = arguments.get("start") or 0
    start = min(max(start + size if start < 0 else start, 0), size)
    end = arguments.get("end")
    if "length" in arguments:
        end = start + arguments["length"]
    end = size if end is None else min(max(end + size if end < 0 else end, start), size)
    return {"dim": dim, "start": start, "end": end, **({"step": step} if step != 1 else {})}


@_for("slice_scatter")
def _slice_scatter(call: AtenCall) -> list[str]:
    source = call.arguments["src"]
    return call.emit(self=call.first, src=source, **slice_bounds(call.arguments, call.input_info.shape))


@_for("chunk", "unsafe_chunk", "unsafe_split", "split", "tensor_split", "split_with_sizes", "unsafe_split_with_sizes")
def _split(call: AtenCall) -> list[str]:
    dim = call.arguments.get("dim", 0) % len(call.input_info.shape)
    sizes = tuple(info.shape[dim] for info in call.infos)
    if len(sizes) == 1:
        return [call.first.name]
    if all(size == sizes[0] for size in sizes[:-1]) and 0 < sizes[-1] <= sizes[0]:
        return call.emit("aten.split.Tensor", self=call.first, split_size=sizes[0], dim=dim)
    return call.emit("aten.split_with_sizes.default", self=call.first, split_sizes=sizes, dim=dim)


@_for("t", "numpy_T", "mT", "matrix_H", "adjoint", "swapaxes", "swapdims", "transpose")
def _transpose(call: AtenCall) -> list[str]:
    rank = len(call.input_info.shape)
    if rank == 0 or (call.target.split(".")[1] in ("t", "numpy_T") and rank < 2):
        return [call.first.name]
    if call.target == "aten.numpy_T.default" and rank > 2:
        return call.emit("aten.permute.default", self=call.first, dims=tuple(reversed(range(rank))))
    named_dims = [call.arguments.get(name) for name in ("dim0", "dim1", "axis0", "axis1")]
    dims = [dim % rank for dim in named_dims if dim is not None] or [rank - 2, rank - 1]
    if dims[0] == dims[1]:
        return [call.first.name]
    return call.emit("aten.transpose.int", self=call.first, dim0=dims[0], dim1=dims[1])


@_for("permute")
def _permute(call: AtenCall) -> list[str]:
    rank = len(call.input_info.shape)
    if [dim % rank for dim in call.arguments["dims"]] == list(range(rank)):
        return [call.first.name]
    return call.keep()


@_for("sum.dim_IntList")
def _sum(call: AtenCall) -> list[str]:
    """No dims are all of them, said so."""
    if call.arguments.get("dim") in (None, ()) and call.input_info.shape:
        return call.emit(**{**call.arguments, "dim": tuple(range(len(call.input_info.shape)))})
    return call.keep()


@_for("movedim", "moveaxis")
def _movedim(call: AtenCall) -> list[str]:
    rank = len(call.input_info.shape)
    if rank == 0:
        return [call.first.name]
    source, target = call.arguments["source"], call.arguments["destination"]
    pairs = zip(source, target, strict=True) if isinstance(source, tuple) else [(source, target)]
    moved = {new % rank: old % rank for old, new in pairs}
    rest = iter(dim for dim in range(rank) if dim not in moved.values())
    dims = tuple(moved[dim] if dim in moved else next(rest) for dim in range(rank))
    return call.emit("aten.permute.default", self=call.first, dims=dims)


@_for("zeros", "ones", "empty", "full", "arange", "linspace", "rand", "randn", "eye", "scalar_tensor", "randperm")
def _create(call: AtenCall) -> list[str]:
    return call.emit(**{**call.arguments, "dtype": Dtype(call.info.dtype)})


@_for("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like")
def _create_like(call: AtenCall) -> list[str]:
    arguments = {name: value for name, value in call.arguments.items() if name != "dtype"}
    if call.input_info.dtype != call.info.dtype:
        arguments["dtype"] = Dtype(call.info.dtype)
    return call.emit(**arguments)


@_for("new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided", "empty_strided")
def _create_new(call: AtenCall) -> list[str]:
    kind = call.target.split(".")[1].removeprefix("new_").removesuffix("_strided")
    target = f"aten.{kind}.{'memory_format' if kind == 'empty' else 'default'}"
    arguments: dict[str, Any] = {"size": call.info.shape}
    if kind == "full":
        arguments["fill_value"] = call.arguments["fill_value"]
    return call.emit(target, **arguments, dtype=Dtype(call.info.dtype))


@_for("copy")
def _copy(call: AtenCall) -> list[str]:
    """What `x.copy_(y)` leaves in x: y, cast and expanded to x."""
    source = call.arguments["src"]
    info = ValueInfo(call.builder.infos[source.name].shape, call.info.dtype)
    converted = write(AtenCall(call.builder, "aten._to_copy.default", {"self": source}, [info], call.place))[0]
    return write(AtenCall(call.builder, "aten.expand.default", {"self": ValueRef(converted)}, call.infos, call.place))


@_for("fill", "zero")
def _fill(call: AtenCall) -> list[str]:
    value = call.arguments.get("value", 0)
    if call.input_info.gradient:  # which is zero, and not none
        target = "aten.fill.Tensor" if isinstance(value, ValueRef) else "aten.fill.Scalar"
        return call.emit(target, self=call.first, value=value)
    if isinstance(value, ValueRef):
        return _copy(AtenCall(call.builder, call.target, {"src": value}, call.infos, call.place))
    dtype = Dtype(call.info.dtype)
    return call.emit("aten.full.default", size=call.info.shape, fill_value=value, dtype=dtype)


@_for("__and__", "__or__", "__xor__")
def _bitwise(call: AtenCall) -> list[str]:
    word = call.target.split("__")[1]
    return call.emit(f"aten.bitwise_{word}.{call.target.rsplit('.', 1)[1]}", **call.arguments)


@_for("linear")
def _linear(call: AtenCall) -> list[str]:
    return _with_bias(call, call.target, {"input": call.first, "weight": call.arguments["weight"]}, "bias")


@_for("addmm")
def _addmm(call: AtenCall) -> list[str]:
    if not set(call.arguments) <= {"self", "mat1", "mat2"}:
        return call.keep()
    product = {"self": call.arguments["mat1"], "mat2": call.arguments["mat2"]}
    return _with_bias(call, "aten.mm.default", product, "self")


@_for(*(f"conv{rank}d" for rank in (1, 2, 3)), "convolution", "conv_transpose1d", "conv_transpose2d")
def _conv(call: AtenCall) -> list[str]:
    rest = {name: value for name, value in call.arguments.items() if name != "bias"}
    bias = call.arguments.get("bias")
    if not isinstance(bias, ValueRef):
        return call.emit(**rest)
    bias_info = call.builder.infos[bias.name]
    space = len(call.builder.infos[call.arguments["weight"].name].shape) - 2  # the input may come without a batch
    shape = (*bias_info.shape, *[1] * space)
    y = call.builder.emit_one(call.target, rest, call.info, call.place)
    info = ValueInfo(shape, bias_info.dtype)
    viewed = call.builder.emit_one("aten.view.default", {"self": bias, "size": shape}, info, call.place, "bias_view")
    return call.emit("aten.add.Tensor", "bias", self=ValueRef(y), other=ValueRef(viewed))


def _with_bias(call: AtenCall, target: str, product: dict[str, Any], name: str) -> list[str]:
    """A product and the addition of its bias as two ops: the bias may have to wait for a sum."""
    bias = call.arguments.get(name)
    if not isinstance(bias, ValueRef):
        return call.emit(target, **product)
    y = call.builder.emit_one(target, product, call.info, call.place)
    return call.emit("aten.add.Tensor", "bias", self=ValueRef(y), other=bias)


@_for("instance_norm")
def _instance_norm(call: AtenCall) -> list[str]:
    if call.arguments.get("use_input_stats") and call.arguments.get("running_mean") is not None:
        remedy = "Build it with track_running_stats=False, or keep it out with sw.opaque(submodule)."
        raise unsupported("an instance norm that tracks statistics writes to them unseen", call.place.source, remedy)
    return call.keep()


@_for("batch_norm")
def _batch_norm(call: AtenCall) -> list[str]:
    """In training one op whose last two outputs are the new statistics (see convert.py)."""
    if len(call.input_info.shape) < 2:
        raise unsupported("a batch norm needs a dim of channels", call.place.source, "Give it two dims at least.")
    arguments = {name: value for name, value in call.arguments.items() if name != "cudnn_enabled"}
    empty = 0 in call.input_info.shape and arguments.get("running_mean") is not None  # nothing is seen, nothing changes
    if not arguments["training"] or empty:
        return call.emit(**{**arguments, "training": False, "cudnn_enabled": False})
    channel = ValueInfo((call.input_info.shape[1],), call.input_info.dtype)
    if arguments.get("running_mean") is None:
        arguments = {name: value for name, value in arguments.items() if not name.startswith("running")}
        infos = [call.info, channel, channel]
        return call.builder.emit("aten._native_batch_norm_legit.no_stats", arguments, infos, call.place)
    running = call.builder.infos[arguments["running_mean"].name]
    infos = [call.info, channel, channel, running, running]
    return call.builder.emit("aten._native_batch_norm_legit_functional.default", arguments, infos, call.place)
