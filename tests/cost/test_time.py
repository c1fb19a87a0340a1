"""The time of an op, in seconds that can be counted by hand."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shardwright.capture import capture
from shardwright.cluster import Curve, Efficiency
from shardwright.cluster.catalogue import DEVICES
from shardwright.cost import OpTime, TrainingSetup, join_time, local_call, op_time, update_time
from shardwright.ir.graph import Slot
from shardwright.layout import Axis, Mesh
from shardwright.ops.attention import STRUCTURED
from shardwright.rules import analyse
from tests.cost.calls import HALF, call, linear, signatures, tensor, whole

MEGA = 1000 * 1000
GPUS = [device for name, device in DEVICES.items() if name != "cpu"]


def test_a_product_takes_its_flops_at_the_rate_of_its_dtype():
    assert op_time(linear(1000, 1000, 1000, data=False, weight=False), HALF).forward == pytest.approx(12e-3)  # bytes
    assert op_time(linear(10**4, 10**4, 10**4), HALF).forward == pytest.approx(2.0)
    assert op_time(linear(10**5, 10**4, 10**4, dtype="bfloat16"), HALF).forward == pytest.approx(20 / 4)


@pytest.mark.parametrize(("data", "weight", "products"), [(True, True, 2), (True, False, 1), (False, True, 1)])
def test_backward_is_a_product_for_each_input_that_has_a_gradient(data, weight, products):
    time = op_time(linear(10**4, 10**4, 10**4, data=data, weight=weight), HALF)
    assert time.backward == pytest.approx(products * time.forward)


def test_what_has_no_gradient_has_no_backward():
    for op_call in (
        linear(100, 100, 100, data=False, weight=False),
        call("gelu", [tensor(100, gradient=False)], [tensor(100, gradient=False)]),
        call("cross_entropy_loss", [tensor(8, 9, gradient=False)], [tensor(gradient=False)]),
    ):
        assert op_time(op_call, HALF).backward == 0


def test_a_thin_product_reaches_less_and_a_batch_of_matrices_is_thin_if_they_are():
    device = DEVICES["A100-80GB"]
    thick = op_time(linear(8192, 8192, 8192, dtype="bfloat16"), device).forward
    thin = op_time(linear(8192 * 64, 128, 8192, dtype="bfloat16"), device).forward
    assert thin > 2 * thick  # 128 / (128 + 192)

    tensors = [tensor(64, 512, 128), tensor(64, 128, 512)]
    many = call("bmm", tensors, [tensor(64, 512, 512)], flops=2.0 * 64 * 512 * 128 * 512)
    single = linear(512 * 64, 512, 128)
    assert op_time(many, device).forward == pytest.approx(op_time(single, device).forward, rel=0.02)


def test_pooling_is_as_slow_as_a_device_says_and_only_forward():
    slow = Efficiency(kind="pooling", curve=Curve(((1.0, 0.05),)))
    device = replace(HALF, efficiency=tuple(slow if item.kind == "pooling" else item for item in HALF.efficiency))
    pool = call("max_pool2d", [tensor(MEGA)], [tensor(MEGA // 4)])
    usual, slower = op_time(pool, HALF), op_time(pool, device)
    assert slower.forward == pytest.approx(10 * usual.forward)
    assert slower.backward == usual.backward > 0
    assert op_time(call("relu", [tensor(MEGA)], [tensor(MEGA)]), device) == op_time(
        call("relu", [tensor(MEGA)], [tensor(MEGA)]), HALF
    )


def test_a_large_product_reaches_what_the_catalogue_says():
    assert op_time(linear(16384, 16384, 16384, dtype="bfloat16"), DEVICES["H100"]).forward == pytest.approx(
        DEVICES["H100"].matmul_time(16384, 16384, 16384, "bfloat16")
    )


def attention(length: int, **arguments: object):
    q = tensor(4, 8, length, 64, dtype="bfloat16")
    return call(
        "scaled_dot_product_attention", [q, q, q], [q], flops=4.0 * 4 * 8 * length * length * 64,
        arguments={"query": Slot(0), "key": Slot(1), "value": Slot(2), **arguments},
    )  # fmt: skip


def test_attention_is_two_products_forward_and_five_slower_ones_backward():
    time = op_time(attention(8192), HALF)
    assert time.forward == pytest.approx(4 * 4 * 8 * 8192**2 * 64 / 4e12)
    assert 2.5 < time.backward / time.forward < 3.5


def test_a_causal_attention_skips_half_and_wastes_its_diagonal():
    full, causal = (op_time(attention(65536, is_causal=is_causal), HALF).forward for is_causal in (False, True))
    assert causal / full == pytest.approx(0.5 + 0.5 * 128 / 65536)
    full, causal = (op_time(attention(64, is_causal=is_causal), HALF).forward for is_causal in (False, True))
    assert causal == full  # one block


def test_attention_with_a_window_takes_as_long_as_what_it_reaches():
    plain = attention(65536)
    masked = op_time(attention(65536, attn_mask=Slot(2)), HALF).forward
    for limits, share in (
        ({"before": 8191, "after": 0}, 0.125 - 0.125**2 / 2 + 128 / 65536),
        ({"after": 0}, 0.5 + 64 / 65536),
        ({"after": 0, "prefix": 32768}, 0.625 + 64 / 65536),
        ({"before": 10**6}, 1.0),
        ({"padding": Slot(0)}, 1.0),
    ):
        op = replace(plain.op, target=STRUCTURED, arguments=(*plain.op.arguments, *limits.items()))
        assert op_time(replace(plain, op=op), HALF).forward / masked == pytest.approx(share, rel=1e-2)


def test_a_pointwise_op_reads_and_writes():
    x = tensor(MEGA)
    assert op_time(call("gelu", [x], [x]), HALF) == pytest.approx(OpTime(8e-3, 12e-3))  # backward reads dy and x


def test_the_gradient_of_a_sum_is_no_kernel_and_that_of_what_was_stretched_is_a_sum():
    x, row = tensor(1000, 1000), tensor(1000)
    assert op_time(call("add", [x, x], [x]), HALF) == pytest.approx(OpTime(12e-3, 0.0))
    assert op_time(call("add", [x, row], [x]), HALF).backward == pytest.approx(4e-3)


def test_a_bias_is_folded_into_its_product():
    x, row = tensor(1000, 1000), tensor(1000, parameter=True)
    time = op_time(call("add", [x, row], [x], name="up / bias"), HALF)
    assert (time.forward, time.backward) == (0.0, pytest.approx(4e-3))


def test_each_factor_of_a_product_by_elements_gets_a_gradient():
    x, fixed = tensor(MEGA), tensor(MEGA, gradient=False)
    assert op_time(call("mul", [x, x], [x]), HALF).backward == pytest.approx(24e-3)
    assert op_time(call("mul", [x, fixed], [x]), HALF).backward == pytest.approx(12e-3)


def test_a_norm_goes_over_its_gradient_twice():
    x, weight = tensor(1000, 1000), tensor(1000)
    assert op_time(call("layer_norm", [x, weight], [x]), HALF) == pytest.approx(OpTime(8e-3, 20e-3), rel=1e-2)


def test_an_embedding_is_as_slow_as_its_rows_forward_and_as_its_table_backward():
    ids = tensor(10, gradient=False, dtype="int64")
    small, large = (
        op_time(call("embedding", [tensor(rows, 100), ids], [tensor(10, 100)]), HALF) for rows in (1000, 10**6)
    )
    assert small.forward == large.forward == pytest.approx((2 * 4000 + 80) / 1e9)
    assert large.backward - small.backward == pytest.approx(4 * 100 * (10**6 - 1000) / 1e9)


def test_cross_entropy_goes_six_times_over_its_scores():
    scores, labels = tensor(1000, 1000), tensor(1000, gradient=False, dtype="int64")
    time = op_time(call("cross_entropy_loss", [scores, labels], [tensor()]), HALF)
    assert sum(time) == pytest.approx(6 * 4e-3)


@pytest.mark.parametrize("kind", ["view", "transpose", "permute", "unsqueeze", "reshape", "detach"])
def test_views_are_free(kind):
    x = tensor(MEGA)
    assert op_time(call(kind, [x], [x]), HALF) == (0.0, 0.0)


def test_copies_are_not():
    x = tensor(MEGA)
    for op_call in (call("clone", [x], [x]), call("reshape", [x], [x], copies=True)):
        assert op_time(op_call, HALF).forward == pytest.approx(8e-3)


def test_parts_are_views_whose_gradients_are_put_together():
    whole, half = tensor(MEGA), tensor(MEGA // 2)
    assert op_time(call("split", [whole], [half, half]), HALF) == pytest.approx(OpTime(0.0, 8e-3))
    assert op_time(call("slice", [whole], [half]), HALF) == pytest.approx(OpTime(0.0, 8e-3))  # with zeros around


def test_joining_copies_and_its_gradients_are_views():
    third = tensor(MEGA)
    assert op_time(call("cat", [third] * 3, [tensor(3 * MEGA)]), HALF) == pytest.approx(OpTime(24e-3, 0.0))


def test_what_is_added_to_a_product_is_no_factor_of_it():
    bias, a, b = tensor(10**4), tensor(10**4, 10**4, gradient=False), tensor(10**4, 10**4)
    time = op_time(call("addmm", [bias, a, b], [a], flops=2e12), HALF)
    assert time.backward == 0  # the output has no gradient
    time = op_time(call("addmm", [bias, a, b], [b], flops=2e12), HALF)
    assert time.backward == pytest.approx(time.forward)


def test_what_is_stretched_is_summed_backward():
    assert op_time(call("expand", [tensor(1000)], [tensor(1000, 1000)]), HALF).backward == pytest.approx(4e-3, rel=0.01)


def test_gradients_of_a_value_that_is_used_often_are_added_one_by_one():
    assert join_time(4e6, 1, HALF) == 0
    assert join_time(4e6, 3, HALF) == pytest.approx(2 * 12e-3)


def test_an_update_is_passes_over_memory():
    assert update_time(1e9, 1e9, 2e9, HALF, fused=True) == pytest.approx(2 + 1 + 4)
    assert update_time(1e9, 1e9, 2e9, HALF) == pytest.approx(10 + 3 + 8)
    assert update_time(1e9, 1e9, 0, HALF, optimizer="sgd") == pytest.approx(3)
    assert update_time(0, 0, 0, HALF) == 0


sides = st.integers(1, 2**14)


@given(st.sampled_from(GPUS), sides, sides, sides, st.integers(1, 8))
def test_more_rows_take_no_less_time(device, rows, wide, out, more):
    less, much = (op_time(linear(count, wide, out, dtype="bfloat16"), device) for count in (rows, rows * more))
    assert sum(much) >= sum(less) * (1 - 1e-9)


@given(st.sampled_from(GPUS), st.tuples(sides, sides, sides), st.integers(0, 2))
def test_a_part_of_eight_is_at_most_eight_times_as_fast(device, shape, at):
    whole_shape = [8 * size if place == at else size for place, size in enumerate(shape)]
    assert op_time(linear(*whole_shape), device).forward <= 8 * op_time(linear(*shape), device).forward * (1 + 1e-3)


kinds = st.sampled_from(["gelu", "add", "softmax", "layer_norm", "dropout"])


@given(st.sampled_from(GPUS), kinds, st.integers(1, 10**9))
def test_a_pointwise_part_of_eight_is_at_most_eight_times_as_fast(device, kind, size):
    part, all_of_it = (sum(op_time(call(kind, [tensor(n)], [tensor(n)]), device)) for n in (size, 8 * size))
    assert part * (1 - 1e-9) <= all_of_it <= 8 * part * (1 + 1e-3)


class Turned(nn.Module):
    """A transpose whose reshape copies, and one after attention, which does not."""

    def forward(self, x):
        B, S, D = x.shape
        turned = x.transpose(1, 2).reshape(B, S * D)
        heads = x.view(B, S, 4, D // 4).transpose(1, 2)
        y = F.scaled_dot_product_attention(heads, heads, heads)
        return turned.sum() + y.transpose(1, 2).reshape(B, S * D).sum()


def test_a_reshape_copies_what_was_turned_but_not_what_attention_wrote():
    by_op = analyse(capture(Turned(), (torch.zeros(2, 8, 16, requires_grad=True),)).graph).signatures
    copied = [whole(signature).copies for signature in by_op.values() if signature.op.target == "aten.reshape.default"]
    assert copied == [True, False]


def test_a_split_op_has_the_time_of_its_part():
    (linear_signature,) = (
        signature
        for target, signature in signatures(nn.Linear(512, 256, bias=False), torch.zeros(64, 512)).items()
        if target == "aten.linear.default"
    )
    mesh = Mesh(axes=(Axis(name="tp", size=2),))
    parts = {
        role.name: local_call(linear_signature, {"tp": role.name}, mesh, TrainingSetup())
        for role in linear_signature.roles
    }
    assert len(parts) == 3
    for part in parts.values():
        assert part.flops == whole(linear_signature).flops / 2
        assert op_time(part, HALF).forward < op_time(whole(linear_signature), HALF).forward


def test_a_call_is_priced_in_microseconds():
    op_call, device = linear(4096, 4096, 4096, dtype="bfloat16"), DEVICES["A100-80GB"]
    op_time(op_call, device)
    begun = time.perf_counter()
    for _ in range(2000):
        op_time(op_call, device)
    assert (time.perf_counter() - begun) / 2000 < 100e-6  # 10 on a laptop; far from milliseconds wherever it runs
