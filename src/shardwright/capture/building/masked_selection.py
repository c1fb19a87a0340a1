"""`x[mask]` and what is computed of it, as long as it ends in a sum, a mean or a loss.

How many elements a boolean mask selects depends on data, and a graph has fixed shapes. So the selection stays in
place: a `MaskedSelection` is the full tensor, with zeros where nothing is selected, and its mask.

    x[mask].square().mean()       where(mask, where(mask, x, 0) ** 2, 0).sum() / mask.sum()
    cross_entropy(y[m], t[m])     cross_entropy(y, where(m, t, ignore_index))

The first `where` keeps garbage (padding, infinities) out of the ops in between, and the ops that are let through are
finite everywhere, so that no gradient of what is not selected is ever other than zero. An empty selection gives what
torch gives: nan for a mean, 0 for a sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from ...ir import Dtype
from ..failure import unsupported
from .aliases import TensorHandle
from .canonical import AtenCall, write
from .finish import is_pure
from .graph_builder import GraphBuilder, OpOrigin, ValueInfo, ValueRef, map_refs, refs
from .in_place_ops import in_place_twin
from .schema import named_arguments, target_name

_POINTWISE = frozenset(
    "add sub rsub mul neg square abs relu tanh sigmoid silu gelu softplus sin cos clamp clamp_min clamp_max sign "
    "leaky_relu elu hardtanh erf atan eq ne lt le gt ge logical_not detach alias clone contiguous _to_copy to".split()
)
_FILLED = {
    **dict.fromkeys("exp expm1 exp2 sinh cosh log1p asin atanh asinh".split(), 0),
    **dict.fromkeys("log log2 log10 sqrt rsqrt reciprocal pow".split(), 1),
}  # what is not selected becomes this first, so that neither the op nor its gradient is infinite there
_LOSSES = frozenset("mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy_with_logits".split())
_REMEDY = "Keep shapes fixed (torch.where instead of a mask), or keep the submodule out with sw.opaque(submodule)."
_MEAN, _SUM = 1, 2  # how a loss is reduced


class EqualSelections(TorchFunctionMode):
    """Within this, what one mask selects of two tensors is of one size, so that they may be computed with together."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: Any = WeakIdKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") == "__getitem__" and not torch.compiler.is_dynamo_compiling():
            mask = args[1]
            if (
                isinstance(mask, torch.Tensor)
                and mask.dtype is torch.bool
                and isinstance(result.shape[0], torch.SymInt)
            ):
                version, size = self.sizes.get(mask, (-1, 0))
                if version == mask._version:
                    torch._check(result.shape[0] == size)  # type: ignore[no-untyped-call]
                else:
                    self.sizes[mask] = (mask._version, result.shape[0])
        return result


@dataclass(frozen=True, slots=True)
class MaskedSelection:
    """A tensor of the shape [mask's dims..., rest...] that stands for one of the shape [selected, rest...]."""

    dense: str
    mask: str
    lead: int  # how many dims the mask has
    place: OpOrigin = field(default_factory=OpOrigin)  # where it was selected


@dataclass(frozen=True, slots=True)
class SelectionOp:
    """One op of a graph that makes, or works on, selections."""

    builder: GraphBuilder
    op: Any
    place: OpOrigin
    dtype: str  # of what it gives
    read: Callable[[Any], Any]

    def take(self, tensor: TensorHandle, mask: TensorHandle) -> MaskedSelection:
        """`tensor[mask]`"""
        lead = len(self.builder.infos[mask.read()].shape)
        return self._masked(MaskedSelection(tensor.read(), mask.read(), lead, self.place), 0)

    def take_all(self, tensor: TensorHandle, mask: TensorHandle) -> MaskedSelection:
        """`torch.masked_select`: both are broadcast."""
        shapes = [self._fact(handle.read()).shape for handle in (tensor, mask)]
        shape = tuple(_broadcast(*shapes))
        names = [
            self._write(
                "aten.expand.default",
                {"self": ValueRef(handle.read())},
                replace(self._fact(handle.read()), shape=shape),
            )
            for handle in (tensor, mask)
        ]
        return self._masked(MaskedSelection(names[0], names[1], len(shape), self.place), 0)

    def apply(self, args: Sequence[Any], kwargs: dict[str, Any]) -> MaskedSelection | TensorHandle | list[Any]:
        """What an op makes of selections; a refusal if it can't be written with the full tensor."""
        named = {a.name: argument for a, argument in zip(self.op._schema.arguments, args, strict=False)} | dict(kwargs)
        kind = self.op._opname
        if kind == "index_put_" and len(named["indices"]) == 1 and not named.get("accumulate"):
            if not isinstance(named["self"], TensorHandle) or not isinstance(named["indices"][0], TensorHandle):
                raise self._refusal("a write to what a boolean mask selects")
            return self.put(named["self"], named["indices"][0], named["values"])
        kind = kind.removesuffix("_")  # what was selected is a copy: written in place, it is another one
        first, *others = selections(named)
        if any(other.lead != first.lead or not _same(self.builder, other.mask, first.mask) for other in others):
            raise self._refusal("two different masks")
        if (
            kind == "broadcast_tensors"
            and len({self._fact(selection.dense).shape for selection in (first, *others)}) == 1
        ):
            return list(named["tensors"])
        if kind in _POINTWISE:
            return self._pointwise(named, first)
        if kind in _FILLED and isinstance(named["self"], MaskedSelection) and not others:
            return self._pointwise({**named, "self": self._masked(first, _FILLED[kind])}, first)
        if kind in ("div", "true_divide", "divide") and isinstance(named["self"], MaskedSelection):
            divisor = named["other"]
            divisor = self._masked(divisor, 1) if isinstance(divisor, MaskedSelection) else divisor
            return self._pointwise({**named, "other": divisor}, first)
        if kind in ("max", "min", "amax", "amin") and not named.get("dim"):
            return self._extreme(first, kind.removeprefix("a"))
        if kind == "linalg_vector_norm" and named.get("dtype") is None and 0 < named.get("ord", 2) < math.inf:
            return self._norm(first, named)
        if kind in ("expand", "expand_as"):
            return self._expand(named, first)
        if kind in ("sum", "mean") and named.get("dtype") is None:
            return self._reduce(first, named.get("dim"), bool(named.get("keepdim")), mean=kind == "mean")
        if kind in _LOSSES:
            value = self._pointwise({**named, "reduction": 0}, first)
            reduction = named.get("reduction", _MEAN)
            return value if reduction == 0 else self._reduce(value, None, False, mean=reduction == _MEAN)
        if kind in ("cross_entropy_loss", "nll_loss_nd", "nll_loss"):
            return self._classes(named, first)
        if kind == "log_softmax" and named["dim"] in (-1, len(self._rest(first))):
            info = self._fact(first.dense)
            return replace(first, dense=self._emit({**named, "self": first, "dim": len(info.shape) - 1}, info))
        if kind == "linear" and self._rest(first):
            info = self._fact(first.dense)
            weight = self._fact(named["weight"].read())
            return replace(first, dense=self._emit(named, replace(info, shape=(*info.shape[:-1], weight.shape[0]))))
        raise self._refusal(f"{target_name(self.op)} on what a boolean mask selects")

    def _pointwise(self, named: dict[str, Any], first: MaskedSelection) -> MaskedSelection:
        info, rest = self._fact(first.dense), self._rest(first)
        for argument in named.values():
            if (
                isinstance(argument, TensorHandle)
                and tuple(_broadcast(self._fact(argument.read()).shape, rest)) != rest
            ):
                raise self._refusal("what a boolean mask selects, together with a tensor of another selection")
            if isinstance(argument, MaskedSelection) and self._fact(argument.dense).shape != info.shape:
                raise self._refusal("selections of different shapes")
        return replace(first, dense=self._emit(named, info))

    def _reduce(
        self, first: MaskedSelection, dims: Any, keepdim: bool, *, mean: bool
    ) -> MaskedSelection | TensorHandle:
        rest = self._rest(first)
        dims = [dims] if isinstance(dims, int) else list(dims) if dims else list(range(1 + len(rest)))
        places = sorted(dim % (1 + len(rest)) for dim in dims)
        if places and places[0] > 0:  # within a selected element: the selection stays
            within = tuple(first.lead + dim - 1 for dim in places)
            sizes = [1 if at in within else size for at, size in enumerate(self._fact(first.dense).shape)]
            shape = sizes if keepdim else [size for at, size in enumerate(sizes) if at not in within]
            info = ValueInfo(tuple(shape), self.dtype)
            arguments = {"self": ValueRef(first.dense), "dim": within, **({"keepdim": True} if keepdim else {})}
            return replace(
                first, dense=self._write(f"aten.{'mean.dim' if mean else 'sum.dim_IntList'}", arguments, info)
            )
        if keepdim:
            raise self._refusal("keepdim of what a boolean mask selects")
        return TensorHandle(self._over_rows(self._masked(first, 0), places, mean))

    def _extreme(self, first: MaskedSelection, kind: str) -> TensorHandle:
        """The largest or smallest element: what is not selected is the other end. Of nothing it is nan."""
        if not self._fact(first.dense).dtype.startswith(("float", "bfloat")):
            raise self._refusal(f"{kind} of integers that a boolean mask selects")
        masked = self._masked(first, -math.inf if kind == "max" else math.inf)
        extreme = self._write(f"aten.{kind}.default", {"self": ValueRef(masked.dense)}, ValueInfo((), self.dtype))
        some = self._write("aten.any.default", {"self": ValueRef(first.mask)}, ValueInfo((), "bool"))
        none = self._write("aten.logical_not.default", {"self": ValueRef(some)}, ValueInfo((), "bool"))
        arguments = {"self": ValueRef(extreme), "mask": ValueRef(none), "value": math.nan}
        return TensorHandle(self._write("aten.masked_fill.Scalar", arguments, ValueInfo((), self.dtype)))

    def _norm(self, first: MaskedSelection, named: dict[str, Any]) -> MaskedSelection | TensorHandle:
        """A norm: zeros add nothing to it."""
        rest = self._rest(first)
        dims = named.get("dim")
        arguments: dict[str, Any] = {"self": ValueRef(self._masked(first, 0).dense)}
        arguments |= {"ord": named["ord"]} if "ord" in named else {}
        if not dims:
            return TensorHandle(self._write("aten.linalg_vector_norm.default", arguments, ValueInfo((), self.dtype)))
        places = sorted(dim % (1 + len(rest)) for dim in dims)
        if places[0] == 0:
            raise self._refusal("a norm over some dims of what a boolean mask selects")
        within = tuple(first.lead + dim - 1 for dim in places)
        sizes = [1 if at in within else size for at, size in enumerate(self._fact(first.dense).shape)]
        keepdim = bool(named.get("keepdim"))
        shape = tuple(size for at, size in enumerate(sizes) if keepdim or at not in within)
        arguments |= {"dim": within, **({"keepdim": True} if keepdim else {})}
        return replace(
            first, dense=self._write("aten.linalg_vector_norm.default", arguments, ValueInfo(shape, self.dtype))
        )

    def _expand(self, named: dict[str, Any], first: MaskedSelection) -> MaskedSelection:
        """`x[mask].expand_as(y[mask])`: each row on its own."""
        like = named.get("other")
        if isinstance(like, MaskedSelection):
            rest = self._rest(like)
        elif "size" in named and all(isinstance(size, int) for size in named["size"][1:]):
            rest = tuple(named["size"][1:])
        else:
            raise self._refusal("a selection expanded to another one")
        mine = self._rest(first)
        if not isinstance(named.get("self"), MaskedSelection) or len(rest) != len(mine) or -1 in rest:
            raise self._refusal("a selection expanded to more dims")
        shape = (*self._fact(first.dense).shape[: first.lead], *rest)
        arguments = {"self": ValueRef(first.dense), "size": shape}
        return replace(first, dense=self._write("aten.expand.default", arguments, ValueInfo(shape, self.dtype)))

    def put(self, tensor: TensorHandle, mask: TensorHandle, value: MaskedSelection) -> TensorHandle:
        """`x[mask] = y[mask]`"""
        info = self._fact(tensor.read())
        lead = len(self._fact(mask.read()).shape)
        alike = value.lead == lead and self._fact(value.dense).shape == info.shape
        if not alike or not _same(self.builder, value.mask, mask.read()):
            raise self._refusal("what one boolean mask selects, written where another one does")
        shape = (*info.shape[:lead], *(1 for _ in info.shape[lead:]))
        wide = self._write(
            "aten.reshape.default", {"self": ValueRef(mask.read()), "shape": shape}, ValueInfo(shape, "bool")
        )
        arguments = {"condition": ValueRef(wide), "self": ValueRef(value.dense), "other": ValueRef(tensor.read())}
        tensor.write(self.builder, self._write("aten.where.self", arguments, info), self.place)
        return tensor

    def _over_rows(self, first: MaskedSelection, places: Sequence[int], mean: bool) -> str:
        info, rest = self._fact(first.dense), self._rest(first)
        summed = (*range(first.lead), *(first.lead + dim - 1 for dim in places if dim > 0))
        shape = tuple(size for at, size in enumerate(info.shape) if at not in summed)
        target = "aten.sum.dim_IntList" if shape else "aten.sum.default"
        arguments = {"self": ValueRef(first.dense), **({"dim": summed} if shape else {})}
        total = self._write(target, arguments, ValueInfo(shape, self.dtype))
        if not mean:
            return total
        count = self._write("aten.sum.default", {"self": ValueRef(first.mask)}, ValueInfo((), "int64"))
        cast = {"self": ValueRef(count), "dtype": Dtype(info.dtype)}
        count = self._write("aten._to_copy.default", cast, ValueInfo((), info.dtype))
        each = math.prod(rest[dim - 1] for dim in places if dim > 0)
        if each != 1:
            count = self._write("aten.mul.Tensor", {"self": ValueRef(count), "other": each}, ValueInfo((), info.dtype))
        return self._write(
            "aten.div.Tensor", {"self": ValueRef(total), "other": ValueRef(count)}, ValueInfo(shape, self.dtype)
        )

    def _classes(self, named: dict[str, Any], first: MaskedSelection) -> TensorHandle:
        """A loss over classes: samples that are not selected are ignored by their label."""
        scores, target = named["self"], named["target"]
        if (
            not isinstance(scores, MaskedSelection)
            or not isinstance(target, MaskedSelection)
            or len(self._rest(scores)) != 1
        ):
            raise self._refusal("a loss of which only the scores or only the labels are selected")
        if self._rest(target) or self._fact(target.dense).dtype != "int64" or named.get("reduction", _MEAN) == 0:
            raise self._refusal("a loss for each row of what a boolean mask selects")
        labels = self._masked(target, named.get("ignore_index", -100))
        count = math.prod(self._fact(first.dense).shape[: first.lead])
        flat = []
        for selection, shape in ((scores, (count, *self._rest(scores))), (labels, (count,))):
            info = replace(self._fact(selection.dense), shape=shape)
            flat.append(
                ValueRef(self._write("aten.reshape.default", {"self": ValueRef(selection.dense), "shape": shape}, info))
            )
        values = {**named, "self": flat[0], "target": flat[1]}
        return TensorHandle(self._emit(values, ValueInfo((), self._fact(scores.dense).dtype)))

    def _masked(self, selection: MaskedSelection, fill: float) -> MaskedSelection:
        info = self._fact(selection.dense)
        mask = replace(
            self._fact(selection.mask),
            shape=(*info.shape[: selection.lead], *(1 for _ in info.shape[selection.lead :])),
        )
        wide = self._write("aten.reshape.default", {"self": ValueRef(selection.mask), "shape": mask.shape}, mask)
        other = self._write("aten.bitwise_not.default", {"self": ValueRef(wide)}, mask)
        arguments = {"self": ValueRef(selection.dense), "mask": ValueRef(other), "value": fill}
        return replace(selection, dense=self._write("aten.masked_fill.Scalar", arguments, info))

    def _rest(self, selection: MaskedSelection) -> tuple[int, ...]:
        return self._fact(selection.dense).shape[selection.lead :]

    def _fact(self, name: str) -> ValueInfo:
        return self.builder.infos[name]

    def _emit(self, named: dict[str, Any], info: ValueInfo) -> str:
        """The op itself, with full tensors in the places of selections."""

        def convert(argument: Any) -> Any:
            return ValueRef(argument.dense) if isinstance(argument, MaskedSelection) else self.read(argument)

        arguments = named_arguments(self.op, (), named, convert)
        target = in_place_twin(self.op) if self.op._opname.endswith("_") else target_name(self.op)
        if target is None:
            raise self._refusal(f"{target_name(self.op)} on what a boolean mask selects")
        return self._write(target, arguments, replace(info, dtype=self.dtype))

    def _write(self, target: str, arguments: dict[str, Any], info: ValueInfo) -> str:
        return write(AtenCall(self.builder, target, arguments, [replace(info, gradient=False)], self.place))[0]

    def _refusal(self, what: str) -> Exception:
        return unsupported(
            f"the graph has no way to say {what}: its size depends on the values of a tensor",
            self.place.source,
            _REMEDY,
        )


def selections(tree: Any) -> list[MaskedSelection]:
    """The selections among some arguments."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, MaskedSelection)]


def refuse_selections(outputs: Any) -> Any:
    """What a graph returns, none of which may be of a size that depends on data."""
    for selection in selections(outputs):
        what = "it returns what a boolean mask selects, and its size depends on the values of a tensor"
        error = unsupported(what, selection.place.source, _REMEDY)
        error.path = selection.place.module
        raise error
    return outputs


def is_selection(op: Any, args: Sequence[Any], builder: GraphBuilder) -> bool:
    """Whether an op selects by one boolean mask: `x[mask]`."""
    if target_name(op) == "aten.masked_select.default":
        return True
    if target_name(op) != "aten.index.Tensor" or len(args[1]) != 1 or not isinstance(args[1][0], TensorHandle):
        return False
    return builder.infos[args[1][0].read()].dtype == "bool"


def _same(builder: GraphBuilder, first: str, other: str) -> bool:
    """Whether two values are computed in the same way of the same values: `t != 3`, written twice."""
    if first == other:
        return True
    makers = {name: step for step in builder.steps for name in step.outputs}
    if first not in makers or other not in makers:
        return False
    mine, theirs = makers[first], makers[other]
    if mine.target != theirs.target or not is_pure(mine) or mine.outputs.index(first) != theirs.outputs.index(other):
        return False
    mine_refs, their_refs = list(refs(mine.arguments)), list(refs(theirs.arguments))
    return (
        map_refs(mine.arguments, lambda _: ValueRef("")) == map_refs(theirs.arguments, lambda _: ValueRef(""))
        and len(mine_refs) == len(their_refs)
        and all(_same(builder, a.name, b.name) for a, b in zip(mine_refs, their_refs, strict=True))
    )


def _broadcast(first: Sequence[int], other: Sequence[int]) -> list[int]:
    rank = max(len(first), len(other))
    pairs = zip((1,) * (rank - len(first)) + tuple(first), (1,) * (rank - len(other)) + tuple(other), strict=True)
    return [b if a == 1 else a for a, b in pairs]
