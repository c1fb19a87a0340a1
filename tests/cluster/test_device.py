from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.cluster import KINDS, AttentionPrice, Curve, Device, Efficiency
from shardwright.cluster.catalogue import DEVICES, FLASH_2, FLASH_3
from shardwright.errors import ClusterError

FLAT = tuple(Efficiency(kind=kind, curve=Curve(((1.0, 0.5),))) for kind in KINDS)
PLAIN = Device(name="plain", flops=(("float32", 1e12),), memory=2**30, bandwidth=1e9, efficiency=FLAT)

devices = st.sampled_from(list(DEVICES.values()))
sizes = st.floats(1, 1e13)


def test_arithmetic_counts_where_there_is_much_of_it_and_memory_where_not():
    assert PLAIN.op_time(1e12, 1.0, "matmul", "float32") == pytest.approx(2.0)
    assert PLAIN.op_time(1.0, 1e9, "matmul", "float32") == pytest.approx(2.0)


def test_pointwise_ops_are_bound_by_memory():
    assert PLAIN.op_time(1e12, 1e9, "pointwise", "int64") == pytest.approx(2.0)


def test_a_product_moves_its_three_matrices():
    thin = PLAIN.matmul_time(1, 1000, 1000, "float32")
    assert thin == pytest.approx((1000 + 1000 * 1000 + 1000) * 4 / 0.5e9)


def test_below_the_smallest_size_the_time_stays():
    curve = Curve(((1000.0, 0.1), (1e6, 0.5)))
    only = [item for item in FLAT if item.kind != "matmul"]
    device = Device(
        name="d", flops=(("float32", 1e12),), memory=1, bandwidth=1e30,
        efficiency=(*only, Efficiency(kind="matmul", dtype="float32", curve=curve)),
    )  # fmt: skip
    assert device.op_time(10, 1, "matmul", "float32") == device.op_time(1000, 1, "matmul", "float32")
    assert device.op_time(1e6, 1, "matmul", "float32") == pytest.approx(1e6 / 0.5e12)


@given(devices, st.sampled_from(KINDS), sizes, sizes, st.floats(1, 100))
def test_more_work_takes_no_less_time(device, kind, flops, bytes, more):
    less = device.op_time(flops, bytes, kind, "float32")
    assert device.op_time(flops * more, bytes * more, kind, "float32") >= less * (1 - 1e-9)


@given(devices, sizes, sizes)
def test_no_op_beats_the_peak(device, flops, bytes):
    time = device.op_time(flops, bytes, "matmul", "float32")
    assert time >= flops / device.peak("float32")
    assert time >= bytes / device.bandwidth


def test_the_efficiency_of_the_dtype_is_taken_before_that_of_any():
    special = Efficiency(kind="copy", dtype="float32", curve=Curve(((1.0, 0.25),)))
    device = Device(name="d", flops=(("float32", 1.0),), memory=1, bandwidth=1.0, efficiency=(*FLAT, special))
    assert device.fraction("copy", 10, "float32") == 0.25
    assert device.fraction("copy", 10, "int64") == 0.5


def test_an_unknown_dtype_says_which_there_are():
    with pytest.raises(ClusterError, match=r"plain has no flops for 'float3', only for float32"):
        PLAIN.peak("float3")


@given(devices, sizes, st.integers(1, 64), st.sampled_from(KINDS))
def test_a_part_of_an_op_takes_its_part_of_the_time_or_more(device, size, parts, kind):
    assert device.scales
    whole, part = (device.op_time(amount, amount, kind, "float32") for amount in (size, size / parts))
    assert part >= whole / parts * (1 - 1e-9)


def test_a_cache_makes_parts_quicker():
    quick = Efficiency(kind="copy", curve=Curve(((1e3, 2.0), (1e6, 1.0))))
    assert not replace(PLAIN, efficiency=(*FLAT[:-1], quick)).scales
    assert PLAIN.scales


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"name": ""}, "name"),
        ({"flops": ()}, "no flops"),
        ({"flops": (("float32", 0.0),)}, "float32 is 0"),
        ({"flops": (("float32", 1.0), ("float32", 2.0))}, "twice"),
        ({"memory": -1}, "memory"),
        ({"bandwidth": float("inf")}, "bandwidth"),
        ({"efficiency": FLAT[1:]}, "no efficiency of matmul"),
        ({"efficiency": FLAT + FLAT}, "twice"),
    ],
)
def test_a_device_that_makes_no_sense_is_refused(changed, words):
    analysis = {"name": "d", "flops": (("float32", 1.0),), "memory": 1, "bandwidth": 1.0, "efficiency": FLAT}
    with pytest.raises(ClusterError, match=words):
        Device(**(analysis | changed))


# -- attention


TOKENS = (512, 1024, 2048, 4096, 8192, 16384)

# TFLOP/s on an H100, heads of 128: figures 5 and 6 of the paper of flash attention 3 (arXiv 2407.08608)
PUBLISHED = [
    (FLASH_2, "full", 370, (309, 350, 362, 368, 370, 370)),
    (FLASH_2, "causal", 370, (191, 260, 298, 319, 333, 335)),
    (FLASH_2, "backward", 370, (214, 260, 291, 310, 318, 322)),
    (FLASH_3, "full", 648, (467, 565, 625, 638, 646, 648)),
    (FLASH_3, "causal", 648, (292, 423, 521, 579, 602, 616)),
    (FLASH_3, "backward", 648, (316, 424, 501, 542, 559, 561)),
]


@pytest.mark.parametrize(("kernel", "which", "best", "published"), PUBLISHED)
def test_kernels_have_the_rates_that_were_published(kernel: AttentionPrice, which, best, published):
    """They count the scores that a mask leaves, and 2.5 times the flops of forward for backward."""
    for keys, rate in zip(TOKENS, published, strict=True):
        needed, edges = (0.5, 1) if which == "causal" else (1.0, 0)
        work = kernel.forward_work(1.0, keys, seen=needed, edges=edges)
        if which == "backward":
            needed, work = 2.5, work * kernel.backward_part(keys)
        assert best * needed / work == pytest.approx(rate, rel=0.08)


def test_a_mask_costs_the_kernel_that_takes_none():
    assert FLASH_3.forward_work(1.0, 8192, mask=True) == FLASH_3.masked * FLASH_3.forward_work(1.0, 8192)


@given(st.sampled_from([FLASH_2, FLASH_3, AttentionPrice()]), st.floats(1, 1e6))
def test_a_causal_attention_is_never_more_than_its_tiles_slower(kernel, keys):
    full, causal = kernel.forward_work(1.0, keys), kernel.forward_work(1.0, keys, seen=0.5, edges=1)
    assert causal <= full / kernel.causal
    assert causal >= 0.5 * full / kernel.causal


@pytest.mark.parametrize("fault", [{"short": -1.0}, {"causal": 0.0}, {"backward": float("inf")}, {"masked": -1.0}])
def test_a_kernel_that_makes_no_sense_is_refused(fault):
    with pytest.raises(ClusterError, match=f"attention_kernel.{next(iter(fault))}"):
        AttentionPrice(**fault)
