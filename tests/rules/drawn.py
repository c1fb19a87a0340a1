"""Calls of ops with arguments drawn at random: a way to draw for every target that has a written rule.

`ways()` maps a target to a function that draws its arguments by name. Pointwise ops are drawn from
their schema; the other families say what their shapes have to do with each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from transformers.integrations import moe

from shardwright.capture.interpret import run_op
from shardwright.ir import Op
from shardwright.ops.attention import STRUCTURED
from shardwright.ops.pointwise import linear_unary, plain
from shardwright.probe.discover import one_op as graph_of_one
from shardwright.rules import Analysis, OpCall, analyse, known_targets, registry
from tests.probe.calls import placed, value

Arguments = dict[str, Any]
assert moe  # it defines an op of its own

FIXED = {
    "aten.soft_margin_loss.default": ("target",), "aten.batch_norm.default": ("running_mean", "running_var"),
    "aten.stft.default": ("window",), "aten.stft.center": ("window",), "aten.cross_entropy_loss.default": ("weight",),
    "aten.multi_margin_loss.default": ("weight",),
}  # fmt: skip
"""Arguments that torch has no derivative for."""

NO_DERIVATIVE = frozenset(
    "aten.floor_divide.default aten.floor_divide.Scalar aten.heaviside.default aten.remainder.Scalar_Tensor "
    "aten.native_channel_shuffle.default aten.scatter.reduce aten.scatter.value_reduce aten.linalg_eig.default".split()
)
"""Ops that torch has no derivative for, or (eigenvectors) one that depends on how they are turned."""


def full_name(name: str) -> str:
    """An op of aten in full, with its overload; ops of others are written so."""
    if name.count(".") > 1:
        return name
    return f"aten.{name}" if "." in name else f"aten.{name}.default"


def one_op(target: str, arguments: Arguments, gradients: bool = True) -> tuple[Analysis, Op, tuple[Tensor, ...]]:
    """A graph of one op, analysed, with its inputs."""
    known, tensors = placed(arguments)
    names = tuple(f"x{at}" for at in range(len(tensors)))
    op = Op(name="/ op", target=target, inputs=names, outputs=(), arguments=known)
    fixed = {arguments[name] for name in FIXED.get(target, ()) if name in arguments}
    values = [
        x.clone().requires_grad_(gradients and (x.is_floating_point() or x.is_complex()) and x not in fixed)
        for x in tensors
    ]
    built = run_op(op, values, {})
    op = replace(op, outputs=tuple(f"y{at}" for at in range(len(built))))
    inputs = tuple(value(name, x) for name, x in zip(names, values, strict=True))
    outputs = tuple(value(name, x) for name, x in zip(op.outputs, built, strict=True))
    return analyse(graph_of_one(OpCall(op, inputs, outputs))), op, tuple(tensors)


@dataclass(frozen=True)
class Dice:
    """Draws sizes and tensors. Sizes are from 1 to 6, so that 2 and 3 shards are even, uneven, or can't be."""

    draw: Callable[[st.SearchStrategy[Any]], Any]

    def of(self, *choices: Any) -> Any:
        return self.draw(st.sampled_from(choices))

    def size(self, least: int = 1) -> int:
        return int(self.draw(st.integers(least, 6)))

    def shape(self, least: int = 1, most: int = 4) -> tuple[int, ...]:
        return tuple(self.draw(st.lists(st.integers(1, 6), min_size=least, max_size=most)))

    def real(self, *shape: int, low: float | None = None, high: float = 1.0) -> Tensor:
        generator = self._generator()
        if low is None:
            return torch.randn(shape, dtype=torch.float64, generator=generator)
        return torch.rand(shape, dtype=torch.float64, generator=generator) * (high - low) + low

    def complex(self, *shape: int) -> Tensor:
        return torch.complex(self.real(*shape), self.real(*shape))

    def ints(self, high: int, *shape: int, low: int = 0) -> Tensor:
        return torch.randint(low, high, shape, generator=self._generator())

    def bools(self, *shape: int) -> Tensor:
        return self.ints(2, *shape).bool()

    def order(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._generator())

    def dim(self, rank: int) -> int:
        return int(self.draw(st.integers(-rank, rank - 1)))

    def dims(self, rank: int, least: int = 1) -> list[int]:
        return list(self.draw(st.lists(st.integers(0, rank - 1), min_size=least, max_size=rank, unique=True)))

    def stretched(self, shape: Sequence[int]) -> tuple[int, ...]:
        """A shape that broadcasts to another."""
        values = [size if self.of(True, True, False) else 1 for size in shape]
        return tuple(values[self.draw(st.integers(0, len(values))) :])

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.draw(st.integers(0, 1000)))


Way = Callable[[Dice], Arguments]
_WAYS: dict[str, Way] = {}


def way(*targets: str) -> Callable[[Way], Way]:
    def register(function: Way) -> Way:
        for target in targets:
            _WAYS[target if "." in target else f"aten.{target}.default"] = function
        return function

    return register


def ways() -> dict[str, Way]:
    return dict(_WAYS)


# Pointwise ops, from their schemas.

WHOLE_NUMBERS = ("bitwise", "gcd", "lcm", "shift", "__and__", "__or__", "logical")
COMPLEX = ("real", "imag")
NUMBERS = {
    "decimals": 2,
    "n": 2,
    "p": 2,
    "exponent": 2,
    "negative_slope": 0.1,
    "threshold": 0.2,
    "value": 0.5,
}
"""What numbers among the arguments are, by name; others are 2 if they are whole, and 0.7."""


def _schema(target: str) -> Any:
    space, name, overload = target.split(".")
    return getattr(getattr(getattr(torch.ops, space), name), overload)._schema


def _pointwise(target: str) -> Way:
    schema = _schema(target)
    name = target.split(".")[1]

    def draw(dice: Dice) -> Arguments:
        shape = dice.shape(1, 3)
        positive = dice.of(True, False)
        by_name: Arguments = {}
        for argument in schema.arguments:
            kind, optional = str(argument.type), argument.has_default_value()
            if "Tensor" in kind and (not optional or name.startswith("clamp")):
                stored = shape if not by_name else dice.stretched(shape)
                if name in ("complex", "polar", "fmax", "isclose", "float_power") or argument.name == "tensor1":
                    stored = shape
                by_name[argument.name] = _element(dice, name, argument.name, stored, positive)
            elif argument.name == "rounding_mode":
                by_name[argument.name] = dice.of("floor", "trunc")
            elif not optional:
                whole = any(word in name for word in WHOLE_NUMBERS) or kind == "int"
                by_name[argument.name] = NUMBERS.get(argument.name, 2 if whole else 0.7)
        if name == "clamp" and "Tensor" not in target.split(".")[2]:
            by_name.update(min=-0.3, max=0.4)
        return by_name

    return draw


def _element(dice: Dice, name: str, argument: str, shape: tuple[int, ...], positive: bool) -> Tensor:
    if argument in ("mask", "condition"):
        return dice.bools(*shape)
    if name == "masked_fill" and argument == "value":
        return dice.real()
    if any(word in name for word in WHOLE_NUMBERS):
        return dice.bools(*shape) if "logical" in name else dice.ints(4, *shape, low=1)
    if name in COMPLEX:
        return dice.complex(*shape)
    if name in ("acosh", "arccosh", "mvlgamma"):
        return dice.real(*shape, low=1.5, high=3.0)
    return dice.real(*shape, low=0.1, high=0.9) if positive else dice.real(*shape)


for _target in sorted(known_targets()):
    if registry._TABLE[_target] in (plain, linear_unary):
        way(_target)(_pointwise(_target))
for _name in "add.Tensor sub.Tensor rsub.Tensor mul.Tensor div.Tensor where.self".split():
    way(full_name(_name))(_pointwise(full_name(_name)))


for _form, _self, _other in (("ScalarSelf", False, True), ("ScalarOther", True, False), ("Scalar", False, False)):

    def _where_scalar(dice: Dice, tensor_self: bool = _self, tensor_other: bool = _other) -> Arguments:
        shape = dice.shape(1, 3)
        return {
            "condition": dice.bools(*shape),
            "self": dice.real(*shape) if tensor_self else 1.5,
            "other": dice.real(*shape) if tensor_other else -1.5,
        }

    way(f"aten.where.{_form}")(_where_scalar)


@way("aten._to_copy.default", "aten.to.dtype")
def _cast(dice: Dice) -> Arguments:
    return {"self": dice.real(*dice.shape()), "dtype": dice.of(torch.float32, torch.float64, torch.int64)}


@way("aten.type_as.default")
def _type_as(dice: Dice) -> Arguments:
    return {"self": dice.real(*dice.shape()), "other": dice.real(1)}


@way("prelu")
def _prelu(dice: Dice) -> Arguments:
    shape = dice.shape(2, 4)
    return {"self": dice.real(*shape), "weight": dice.real(dice.of(1, shape[1]))}


@way("glu")
def _glu(dice: Dice) -> Arguments:
    shape = list(dice.shape(1, 3))
    dim = dice.dim(len(shape))
    shape[dim] *= 2
    return {"self": dice.real(*shape), "dim": dim}


# Products.


@way("linear")
def _linear(dice: Dice) -> Arguments:
    k, n = dice.size(), dice.size()
    bias = dice.real(n) if dice.of(0, 1) else None
    return {"input": dice.real(*dice.shape(1, 3), k), "weight": dice.real(n, k), "bias": bias}


def _two(left: str, right: str, names: tuple[str, str] = ("self", "mat2"), added: str = "") -> Way:
    def draw(dice: Dice) -> Arguments:
        sizes = {label: dice.size() for label in "bmkn"}
        actual = {names[0]: dice.real(*(sizes[n] for n in left)), names[1]: dice.real(*(sizes[n] for n in right))}
        if not added:
            return actual
        shape = tuple(sizes[label] for label in added)
        return {"self": dice.real(*(dice.stretched(shape) if added != "m" else shape)), **actual}

    return draw


way("mm")(_two("mk", "kn"))
way("bmm")(_two("bmk", "bkn"))
way("mv")(_two("mk", "k", ("self", "vec")))
way("dot")(_two("k", "k", ("self", "tensor")))
way("outer", "ger")(_two("m", "n", ("self", "vec2")))
way("inner")(_two("bmk", "nk", ("self", "other")))
way("linalg_vecdot")(_two("bmk", "bmk", ("x", "y")))
way("addmm")(_two("mk", "kn", ("mat1", "mat2"), "mn"))
way("addmv")(_two("mk", "k", ("mat", "vec"), "m"))
way("addr")(_two("m", "n", ("vec1", "vec2"), "mn"))
way("addbmm")(_two("bmk", "bkn", ("batch1", "batch2"), "mn"))
way("baddbmm")(_two("bmk", "bkn", ("batch1", "batch2"), "bmn"))


@way("_grouped_mm")
def _grouped_mm(dice: Dice) -> Arguments:
    """Torch has this product for single precision only, and for sides that are multiples of four."""
    k, n = 4 * dice.of(2, 4), 4 * dice.of(2, 4)
    offsets = torch.tensor([*sorted(dice.ints(9, 2).tolist()), 8], dtype=torch.int32)
    return {"self": dice.real(8, k).float(), "mat2": dice.real(3, k, n).float(), "offs": offsets}


@way("transformers.grouped_mm_fallback.default")
def _grouped_fallback(dice: Dice) -> Arguments:
    k, n = 2 * dice.size(), 2 * dice.size()
    offsets = torch.tensor([*sorted(dice.ints(9, 2).tolist()), 8])
    return {"input": dice.real(8, k), "weight": dice.real(3, k, n), "offs": offsets}


@way("matmul")
def _matmul(dice: Dice) -> Arguments:
    m, k, n = dice.size(), dice.size(), dice.size()
    lead = dice.shape(0, 2)
    left = (k,) if dice.of(0, 0, 1) else (*dice.stretched(lead), m, k)
    right = (k,) if dice.of(0, 0, 1) else (*dice.stretched(lead), k, n)
    return {"self": dice.real(*left), "other": dice.real(*right)}


@way("einsum")
def _einsum(dice: Dice) -> Arguments:
    equation = dice.of(
        "bik,bkj->bij", "bhid,bhjd->bhij", "ij,jk", "...ik,kj->...ij", "ii->i", "ab,ac->bc", "bij->bji", "i,j->ij",
        "abc,cd,de->abe", "b...d,d->b...", "ij->",
    )  # fmt: skip
    sizes = {label: dice.size(2) for label in "abcdehijk"}
    tensors = []
    for term in equation.split("->")[0].split(","):
        shape: list[int] = []
        for part in term.replace("...", "."):
            shape += [3, 4] if part == "." else [sizes[part]]
        tensors.append(dice.real(*shape))
    return {"equation": equation, "tensors": tensors}


@way("tensordot")
def _tensordot(dice: Dice) -> Arguments:
    a, b, c, d = (dice.size() for _ in range(4))
    return {"self": dice.real(a, b, c), "other": dice.real(c, d, a), "dims_self": [2, 0], "dims_other": [0, 2]}


@way("bilinear")
def _bilinear(dice: Dice) -> Arguments:
    rows, i, j, n = dice.shape(1, 2), dice.size(), dice.size(), dice.size()
    return {
        "input1": dice.real(*rows, i), "input2": dice.real(*rows, j), "weight": dice.real(n, i, j),
        "bias": dice.real(n) if dice.of(0, 1) else None,
    }  # fmt: skip


@way("aten.cdist.default")
def _cdist(dice: Dice) -> Arguments:
    lead = dice.shape(0, 2)
    return {
        "x1": dice.real(*dice.stretched(lead), 4, 3), "x2": dice.real(*dice.stretched(lead), dice.size(), 3), "p": 2.0
    }  # fmt: skip


@way("aten._cdist_forward.default")
def _cdist_forward(dice: Dice) -> Arguments:
    b = dice.size()
    return {"x1": dice.real(b, 4, 3), "x2": dice.real(b, 5, 3), "p": 2.0, "compute_mode": None}


def _conv(rank: int, transposed: bool, words: bool = False) -> Way:
    def draw(dice: Dice) -> Arguments:
        groups = dice.of(1, 1, 2, 3, 4, 6)
        c, o = dice.of(1, 2, 3), dice.of(1, 2, 3)
        c, o = (c, o) if groups > 1 else (dice.size(), dice.size())
        space = [dice.of(4, 5) for _ in range(rank)]
        window = [dice.of(1, 2, 3) for _ in range(rank)]
        n = [dice.size()] if dice.of(1, 1, 1, 0) else []
        weight = (groups * c, o) if transposed else (groups * o, c)
        actual: Arguments = {"input": dice.real(*n, groups * c, *space), "weight": dice.real(*weight, *window)}
        actual["bias"] = dice.real(groups * o) if dice.of(0, 1) else None
        actual["stride"] = [1] * rank if words else [dice.of(1, 2)] * rank
        actual["padding"] = dice.of("same", "valid") if words else [dice.of(0, 1)] * rank
        if transposed:
            actual["output_padding"] = [0] * rank
        actual["groups"] = groups
        return actual

    return draw


for _rank in (1, 2, 3):
    way(f"aten.conv{_rank}d.default")(_conv(_rank, False))
    way(f"aten.conv{_rank}d.padding")(_conv(_rank, False, True))
    way(f"aten.conv_transpose{_rank}d.{'default' if _rank == 1 else 'input'}")(_conv(_rank, True))


@way("convolution")
def _convolution(dice: Dice) -> Arguments:
    transposed = dice.of(True, False)
    actual = _conv(2, transposed)(dice)
    actual["input"] = actual["input"] if actual["input"].dim() == 4 else actual["input"][None]
    return {**actual, "dilation": [1, 1], "transposed": transposed, "output_padding": [0, 0]}


@way(STRUCTURED)
def _structured_attention(dice: Dice) -> Arguments:
    b, g, r, s, t, e = (dice.size() for _ in range(6))
    arguments: Arguments = {
        "query": dice.real(b, g * r, s, e),
        "key": dice.real(b, g, t, e),
        "value": dice.real(b, g, t, e),
    }
    if dice.of(True, False):
        rows = dice.of(1, b)
        arguments |= {"query_documents": dice.ints(2, rows, s), "key_documents": dice.ints(2, rows, t)}
    if dice.of(True, False):
        arguments["padding"] = dice.ints(4, dice.of(1, b), t) > 0
    if dice.of(True, False):
        arguments |= {"before": dice.of(None, 1, 3), "after": dice.of(None, 0, 2), "prefix": dice.of(0, 2)}
    return arguments


@way("scaled_dot_product_attention")
def _attention(dice: Dice) -> Arguments:
    b, g, r, s, t, e = (dice.size() for _ in range(6))
    grouped = dice.of(True, False)
    heads = g * r if grouped else g
    causal = dice.of(True, False)
    mask = None if causal or dice.of(0, 1) else dice.real(*dice.stretched((b, heads, s)), t)
    return {
        "query": dice.real(b, heads, s, e), "key": dice.real(b, g, t, e), "value": dice.real(b, g, t, e),
        "attn_mask": mask, "dropout_p": 0.0, "is_causal": causal, "scale": None, "enable_gqa": grouped,
    }  # fmt: skip
