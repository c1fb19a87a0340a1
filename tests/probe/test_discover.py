"""Common ops with their written rules taken away: probing finds every split that was written.

Only splits that lowering rewrites can't be found by running the op itself on shards: algorithms of the
runtime (a table split on its rows) and shares (a mean becomes a local sum over the whole count).
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.ir import Op, Slot, Value
from shardwright.layout import Axis, Layout, Mesh
from shardwright.probe.check import local_op, run_plain
from shardwright.probe.discover import discover, one_op
from shardwright.rules import Analysis, OpCall, Rule, analyse, find_rule

from .calls import flags, ids, make_call, randn

UNARY = (
    "relu gelu silu tanh sigmoid exp log sqrt abs cos sin erf reciprocal neg square floor sign clone leaky_relu elu "
    "hardtanh hardswish softplus mish selu log1p expm1 rsqrt detach isnan logical_not atan"
)
BINARY = "add.Tensor sub.Tensor mul.Tensor div.Tensor maximum minimum pow.Tensor_Tensor atan2 eq.Tensor lt.Tensor"


def _unary(name: str) -> Callable[[], OpCall]:
    return lambda: make_call(name, randn(6, 4, 8))


def _binary(name: str) -> Callable[[], OpCall]:
    return lambda: make_call(name, randn(6, 4, 8), randn(4, 1))


def m(*args, **kwargs):
    return lambda: make_call(*args, **kwargs)


torch.manual_seed(0)
OPS: dict[str, Callable[[], OpCall]] = {
    **{name: _unary(name) for name in UNARY.split()},
    **{name: _binary(name) for name in BINARY.split()},
    "add, a number": m("add.Tensor", randn(6, 4), 2.0),
    "mul, a number": m("mul.Tensor", randn(6, 4), 2.0),
    "pow, a number": m("pow.Tensor_Scalar", randn(6, 4), 2.0),
    "clamp": m("clamp", randn(6, 4), -0.5, 0.5),
    "where": m("where.self", flags(6, 4, 8), randn(6, 4, 8), randn(8)),
    "masked_fill": m("masked_fill.Scalar", randn(6, 4, 8), flags(6, 1, 8), 3.0),
    "cast": m("_to_copy", randn(6, 4), dtype=torch.float32),
    "cast to whole numbers": m("_to_copy", randn(6, 4), dtype=torch.int64),
    "addcmul": m("addcmul", randn(6, 4), randn(6, 4), randn(4)),
    "lerp": m("lerp.Scalar", randn(6, 4), randn(6, 4), 0.3),
    "linear": m("linear", randn(6, 4, 8), randn(10, 8)),
    "linear, one row": m("linear", randn(8), randn(10, 8)),
    "addmm": m("addmm", randn(10), randn(6, 8), randn(8, 10)),
    "mm": m("mm", randn(6, 8), randn(8, 10)),
    "bmm": m("bmm", randn(6, 4, 8), randn(6, 8, 10)),
    "mv": m("mv", randn(6, 8), randn(8)),
    "dot": m("dot", randn(8), randn(8)),
    "matmul": m("matmul", randn(6, 4, 8), randn(8, 10)),
    "matmul, stretched": m("matmul", randn(6, 1, 4, 8), randn(3, 8, 10)),
    "matmul, a vector": m("matmul", randn(6, 4, 8), randn(8)),
    "einsum": m("einsum", "bik,bkj->bij", [randn(6, 4, 8), randn(6, 8, 10)]),
    "einsum, outer": m("einsum", "i,j->ij", [randn(6), randn(8)]),
    "einsum, three": m("einsum", "bi,ij,bj->b", [randn(6, 4), randn(4, 8), randn(6, 8)]),
    "conv1d": m("conv1d", randn(6, 4, 9), randn(10, 4, 3)),
    "conv2d": m("conv2d", randn(6, 4, 5, 5), randn(10, 4, 3, 3), None, [1, 1], [1, 1]),
    "conv2d, strided": m("conv2d", randn(6, 4, 7, 7), randn(10, 4, 3, 3), None, [2, 2]),
    "conv2d, groups": m("conv2d", randn(6, 12, 5, 5), randn(20, 3, 3, 3), None, [1, 1], [0, 0], [1, 1], 4),
    "conv2d, by channel": m("conv2d", randn(6, 4, 5, 5), randn(4, 1, 3, 3), None, [1, 1], [0, 0], [1, 1], 4),
    "conv_transpose2d": m("conv_transpose2d.input", randn(6, 4, 5, 5), randn(4, 10, 3, 3)),
    "attention": m("scaled_dot_product_attention", randn(6, 4, 3, 5), randn(6, 4, 7, 5), randn(6, 4, 7, 5)),
    "attention, causal": m(
        "scaled_dot_product_attention", randn(6, 4, 3, 5), randn(6, 4, 3, 5), randn(6, 4, 3, 5), is_causal=True
    ),
    "attention, mask": m(
        "scaled_dot_product_attention", randn(6, 4, 3, 5), randn(6, 4, 7, 5), randn(6, 4, 7, 5), randn(6, 1, 3, 7)
    ),
    "sum": m("sum", randn(6, 4)),
    "sum, dims": m("sum.dim_IntList", randn(6, 4, 8), [0, 2]),
    "sum, kept": m("sum.dim_IntList", randn(6, 4, 8), [1], True),
    "sum of whole numbers": m("sum.dim_IntList", ids(6, 4, 8), [1]),
    "mean": m("mean.dim", randn(6, 4, 8), [1]),
    "amax": m("amax", randn(6, 4, 8), [1]),
    "amax, kept": m("amax", randn(6, 4, 8), [2], True),
    "max.dim": m("max.dim", randn(6, 4, 8), 1),
    "argmax": m("argmax", randn(6, 4, 8), 1),
    "any": m("any.dim", flags(6, 4, 8), 1),
    "var": m("var.correction", randn(6, 4, 8), [2]),
    "logsumexp": m("logsumexp", randn(6, 4, 8), [1]),
    "vector norm": m("linalg_vector_norm", randn(6, 4, 8), 2, [2]),
    "softmax": m("softmax.int", randn(6, 4, 8), 1),
    "log_softmax": m("log_softmax.int", randn(6, 4, 8), -1),
    "cumsum": m("cumsum", randn(6, 4, 8), 1),
    "cumprod": m("cumprod", randn(6, 4, 8), 1),
    "sort": m("sort", randn(6, 4, 8), 1),
    "argsort": m("argsort", randn(6, 4, 8), 1),
    "topk": m("topk", randn(6, 4, 8), 3, -1),
    "layer_norm": m("layer_norm", randn(6, 4, 8), [8], randn(8), randn(8)),
    "layer_norm, two dims": m("layer_norm", randn(6, 4, 8), [4, 8]),
    "rms_norm": m("rms_norm", randn(6, 4, 8), [8], randn(8)),
    "group_norm": m("group_norm", randn(6, 4, 8), 2, randn(4), randn(4)),
    "batch_norm, eval": m("batch_norm", randn(6, 4, 8), randn(4), randn(4), randn(4), randn(4).square() + 1, False, 0.1,
                          1e-5, False),
    "max_pool2d": m("max_pool2d", randn(6, 4, 6, 6), [2, 2]),
    "avg_pool2d": m("avg_pool2d", randn(6, 4, 6, 6), [2, 2]),
    "adaptive_avg_pool2d": m("adaptive_avg_pool2d", randn(6, 4, 7, 7), [3, 3]),
    "upsample_nearest2d": m("upsample_nearest2d.vec", randn(6, 4, 5, 5), None, [2.0, 2.0]),
    "pixel_shuffle": m("pixel_shuffle", randn(6, 8, 5, 5), 2),
    "view, merged": m("view", randn(6, 4, 8), [24, 8]),
    "view, split": m("view", randn(6, 4, 24), [6, 4, 3, 8]),
    "view, both": m("view", randn(6, 4, 10), [24, 2, 5]),
    "view, three in one": m("view", randn(3, 4, 5, 7), [60, 7]),
    "reshape": m("reshape", randn(6, 4, 8), [6, -1]),
    "view, clash": m("view", randn(5, 6, 4), [5, 8, 3]),
    "flatten": m("flatten.using_ints", randn(6, 4, 8), 1, 2),
    "unflatten": m("unflatten.int", randn(6, 4, 24), 2, [3, 8]),
    "squeeze": m("squeeze.dim", randn(6, 1, 8), 1),
    "unsqueeze": m("unsqueeze", randn(6, 4, 8), 1),
    "permute": m("permute", randn(6, 4, 8), [2, 0, 1]),
    "transpose": m("transpose.int", randn(6, 4, 8), 1, 2),
    "t": m("t", randn(6, 4)),
    "flip": m("flip", randn(6, 4, 8), [1]),
    "roll": m("roll", randn(6, 4, 8), [1], [1]),
    "expand": m("expand", randn(1, 8), [6, 4, 8]),
    "repeat": m("repeat", randn(6, 4, 8), [1, 2, 1]),
    "slice, half": m("slice.Tensor", randn(6, 4, 8), 2, 4, 8),
    "slice, odd": m("slice.Tensor", randn(6, 5, 8), 1, 1, 4),
    "select": m("select.int", randn(6, 4, 8), 1, 2),
    "split": m("split.Tensor", randn(6, 4, 9), 3, 2),
    "unbind": m("unbind.int", randn(6, 4, 8), 1),
    "cat": m("cat", [randn(6, 4, 8), randn(6, 4, 8)], 1),
    "cat, uneven": m("cat", [randn(6, 4, 8), randn(6, 7, 8)], 1),
    "stack": m("stack", [randn(6, 4, 8), randn(6, 4, 8), randn(6, 4, 8)], 1),
    "pad": m("constant_pad_nd", randn(6, 4, 8), [1, 2]),
    "pad, one": m("constant_pad_nd", randn(6, 4, 8), [1, 2], 1.0),
    "tril": m("tril", randn(6, 4, 4)),
    "embedding": m("embedding", randn(9, 8), ids(6, 4)),
    "gather": m("gather", randn(6, 4, 8), 1, ids(6, 3, 8)),
    "gather, all rows": m("gather", randn(6, 4), 1, ids(6, 4)),
    "index_select": m("index_select", randn(6, 4, 8), 1, ids(5)),
    "index": m("index.Tensor", randn(9, 8), [ids(6, 4)]),
    "mse, none": m("mse_loss", randn(6, 4), randn(6, 4), 0),
    "mse, mean": m("mse_loss", randn(6, 4), randn(6, 4), 1),
    "mse, sum": m("mse_loss", randn(6, 4), randn(6, 4), 2),
    "l1, sum": m("l1_loss", randn(6, 4), randn(6, 4), 2),
    "smooth l1, none": m("smooth_l1_loss", randn(6, 4), randn(6, 4), 0),
    "bce with logits, sum": m("binary_cross_entropy_with_logits", randn(6, 4), randn(6, 4), None, None, 2),
    "kl, sum": m("kl_div", randn(6, 4), randn(6, 4), 2),
    "cross entropy, none": m("cross_entropy_loss", randn(6, 5), ids(6), None, 0),
    "cross entropy, sum": m("cross_entropy_loss", randn(6, 5), ids(6), None, 2),
    "cross entropy, pixels, sum": m("cross_entropy_loss", randn(6, 5, 4), ids(6, 4), None, 2),
    "nll, sum": m("nll_loss_nd", randn(6, 5), ids(6), None, 2),
}  # fmt: skip

# Where probing finds a split that no rule names, and why it is one.
MORE = {
    "attention": "the width of the values is a column of a product",
    "attention, causal": "the width of the values is a column of a product",
    "attention, mask": "the width of the values is a column of a product",
    "any": "or is the maximum of values without gradient",
    "amax": "the maximum of a value without gradient",
    "amax, kept": "the maximum of a value without gradient",
    "group_norm": "groups are normalised each by itself",
    "max_pool2d": "windows that do not overlap",
    "avg_pool2d": "windows that do not overlap",
    "upsample_nearest2d": "every element is repeated by itself",
    "pixel_shuffle": "channels and places are regrouped, as in a view",
    "gather": "every index is looked up by itself",
    "gather, all rows": "every index is looked up by itself",
    "batch_norm, eval": "with fixed statistics every place is by itself",
}

Splits = dict[tuple[tuple[tuple[Layout, ...], tuple[Layout, ...]], ...], str]
MESHES = [Mesh(axes=(Axis(name="tp", size=parts),)) for parts in (2, 3)]


def analysis_of(call: OpCall, rule: Rule | None) -> Analysis:
    return analyse(one_op(call), lambda call: (rule, ""))


def splits_of(analysis: Analysis) -> Splits:
    """Every role by the layouts it gives."""
    (op,) = analysis.graph.ops
    signature = analysis.signatures[op.name]
    return {tuple(signature.layouts({"tp": role.name}, mesh) for mesh in MESHES): role.name for role in signature.roles}


def linear_of(analysis: Analysis) -> set[frozenset[int]]:
    (op,) = analysis.graph.ops
    inputs = analysis.signatures[op.name].inputs
    groups = analysis.signatures[op.name].linear_groups()
    return {frozenset(at for at, value in enumerate(inputs) if value.linear == group) for group in groups}


def is_rewritten(analysis: Analysis, role: str) -> bool:
    """Whether lowering makes something else of the op for this split."""
    (op,) = analysis.graph.ops
    body = local_op(analysis, op, role, MESHES[0])[0].body
    return [local.target for local in body] != [op.target]


def test_there_are_a_hundred_ops():
    targets = {make().op.target for make in OPS.values()}
    assert len(OPS) >= 100
    assert len(targets) >= 100


@pytest.mark.parametrize("name", OPS)
def test_probing_finds_what_was_written(name):
    call = OPS[name]()
    written, (rule, why) = find_rule(call), discover(call, run_plain)
    assert rule is not None, why
    analysis = analysis_of(call, rule)
    assert written is not None, f"found {rule.text}"
    known = analysis_of(call, written)

    missing = [role for split, role in splits_of(known).items() if split not in splits_of(analysis)]
    more = [role for split, role in splits_of(analysis).items() if split not in splits_of(known)]

    assert [role for role in missing if not is_rewritten(known, role)] == [], f"{rule.text}, written {written.text}"
    assert not more or name in MORE, f"{more} of {rule.text}, written {written.text}"
    assert linear_of(known) <= linear_of(analysis), f"{rule.text}, written {written.text}"


def test_probing_is_quick():
    times = []
    for make in list(OPS.values())[::3]:
        call = make()
        start = time.process_time()
        discover(call, run_plain, version=time.monotonic_ns())
        times.append(time.process_time() - start)
    times.sort()
    print(f"\n{len(times)} ops: median {times[len(times) // 2] * 1e3:.1f} ms, slowest {times[-1] * 1e3:.1f} ms")
    assert times[len(times) // 2] < 0.1  # a few milliseconds on a quiet machine


def discovered(*args, **kwargs) -> Rule:
    rule, why = discover(make_call(*args, **kwargs), run_plain)
    assert rule is not None, why
    return rule


@pytest.mark.parametrize(
    ("name", "text"),
    [("amax", "a b+max c -> a c"), ("amin", "a b+min c -> a c"), ("any.dim", "a b+max c -> a c")],
)
def test_extremes_of_values_without_gradient_are_joined_by_max_and_min(name, text):
    x = flags(6, 4, 8) if name == "any.dim" else randn(6, 4, 8)
    assert discovered(name, x, 1 if name == "any.dim" else [1], gradient=False).text == text


def test_an_extreme_with_a_gradient_is_not_split():
    assert discovered("amax", randn(6, 4, 8), [1]).text == "a c^ b -> a b"


def test_a_bias_is_added_once_where_a_product_is_summed():
    assert discovered("addmm", randn(10), randn(6, 8), randn(8, 10)).text == "a & ~1, b c+ ~1, c+ a -> b a"


def test_arguments_that_hold_a_size_are_found():
    rule = discovered("view", randn(6, 4, 24), [24, 3, 8])
    assert rule.text == "a b (c d) ~1 -> (a b) c d"
    assert dict(rule.local) == {"size.0": ("a", "b"), "size.1": ("c",), "size.2": ("d",)}


def test_a_call_of_real_size_is_probed_at_a_small_one():
    """Nothing of that size is ever made; the rule has the real sizes."""
    x, y = (value("x", (16, 2048, 4096)), value("y", (16, 2048, 32, 128)))
    arguments = (("self", Slot(0)), ("size", (16, 2048, 32, 128)))
    op = Op(name="/ view", target="aten.view.default", inputs=("x",), outputs=("y",), arguments=arguments)
    rule, why = discover(OpCall(op, (x,), (y,)), run_plain)
    assert rule is not None, why
    assert rule.text == "a b (c d) ~1 -> a b c d"
    assert dict(rule.sizes) == {"a": 16, "b": 2048, "c": 32, "d": 128}


def value(name: str, shape: tuple[int, ...]) -> Value:
    return Value(name=name, shape=shape, dtype="float32", gradient=True)


def reason(*args, **kwargs) -> str:
    rule, why = discover(make_call(*args, **kwargs), run_plain)
    assert rule is None
    return why


def test_what_draws_random_numbers_is_not_split():
    assert reason("bernoulli", torch.rand(6, 4, dtype=torch.float64)) == (
        "it could not be probed: it returns another result each time"
    )


def test_what_refuses_random_inputs_says_so():
    assert "can't be called with random inputs" in reason("linalg_cholesky", torch.eye(4, dtype=torch.float64))


def test_a_known_call_is_not_probed_again():
    calls = []

    def run(op, inputs):
        calls.append(op)
        return run_plain(op, inputs)

    call = make_call("tanh", randn(3, 5))
    first = discover(call, run, version=1)
    probed = len(calls)
    assert discover(call, run, version=1) == first
    assert len(calls) == probed > 0


@torch.library.custom_op("shardwright_probe::first_rows", mutates_args=())
def first_rows(x: torch.Tensor, count: int) -> torch.Tensor:
    """Zero after so many rows."""
    return x * (torch.arange(x.shape[0]) < count).view(-1, 1)


def test_a_number_that_is_a_place_stays_within_the_small_sizes():
    """Row 100 of 4096 is neither the first row nor beyond the last."""
    x, y = value("x", (4096, 512)), value("y", (4096, 512))
    arguments = (("x", Slot(0)), ("count", 100))
    target = "shardwright_probe.first_rows.default"
    op = Op(name="/ f", target=target, inputs=("x",), outputs=("y",), arguments=arguments)
    gradient_free = tuple(dataclasses.replace(value, gradient=False) for value in (x, y))
    rule, why = discover(OpCall(op, gradient_free[:1], gradient_free[1:]), run_plain)
    assert rule is not None, why
    assert rule.text == "b^ a ~1 -> b^ a"


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_every_einsum_is_found(data):
    """Any product of up to three tensors: labels that stay are joined, labels that go are summed."""
    term = st.lists(st.sampled_from("abcd"), min_size=1, max_size=3, unique=True)
    terms = data.draw(st.lists(term, min_size=1, max_size=3))
    used = sorted({label for term in terms for label in term})
    kept = data.draw(st.permutations(used))[: data.draw(st.integers(0, len(used)))]
    sizes = dict(zip("abcd", (6, 4, 5, 7), strict=True))
    equation = f"{','.join(''.join(term) for term in terms)}->{''.join(kept)}"
    call = make_call("einsum", equation, [randn(*(sizes[label] for label in term)) for term in terms])
    written, (rule, why) = find_rule(call), discover(call, run_plain)
    assert written is not None and rule is not None, why
    assert set(splits_of(analysis_of(call, written))) == set(splits_of(analysis_of(call, rule))), (equation, rule.text)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_every_regrouping_of_dims_is_found(data):
    """A view from one grouping of some factors to another."""
    factors = data.draw(st.lists(st.sampled_from([2, 3, 4, 5]), min_size=2, max_size=4))
    grouped = [[math.prod(group) for group in _groups(data, factors)] for _ in range(2)]
    call = make_call("view", randn(*grouped[0]), grouped[1])
    written, (rule, why) = find_rule(call), discover(call, run_plain)
    assert written is not None and rule is not None, why
    missing = set(splits_of(analysis_of(call, written))) - set(splits_of(analysis_of(call, rule)))
    assert not missing, (grouped, rule.text, written.text)


def _groups(data, factors):
    ends = [*sorted(data.draw(st.sets(st.integers(1, len(factors) - 1)))), len(factors)]
    return [factors[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def test_a_result_that_does_not_depend_on_its_inputs_proves_no_split():
    """A cosine of random vectors is below the margin: the loss is clamped to zero, split or not."""
    call = make_call("cosine_embedding_loss", randn(6), randn(6), torch.tensor(-1.0), 0.99)
    rule, why = discover(call, run_plain)
    assert rule is None and "proves nothing" in why


def test_an_op_is_probed_where_it_is_finite_or_not_at_all():
    """NaN equals NaN under any split."""

    def total(op, inputs):  # of each row, which a split of its dim needs `+` for
        return [(inputs[0] - offset).sqrt().sum(-1)]

    call = make_call("sum.dim_IntList", randn(6, 4), [1])
    offset = 0.0
    rule, why = discover(call, total, "positive")
    assert rule is not None and rule.text == "a b+ -> a", why
    offset = 9.0
    rule, why = discover(call, total, "nowhere")
    assert rule is None and "no finite element" in why
