"""How a precision is said, and what is refused with what was probably meant."""

import pytest
import torch

import shardwright as sw
from shardwright.errors import InputError
from shardwright.precision import NAMED, Precision, read_precision


def test_names():
    assert read_precision(None) == Precision()
    assert not read_precision(None).casts
    assert read_precision("bf16-mixed") == Precision(parameters="float32", compute="bfloat16")
    assert read_precision("fp16").master
    assert all(read_precision(value) is value for value in NAMED.values())


def test_in_full():
    message = read_precision(
        {"base": "bf16", "sync": torch.float32, "buffers": None, "overrides": {"*.norm.*": "fp32", "head.*": "fp16"}}
    )
    assert message == Precision(
        parameters="bfloat16", inputs="bfloat16", master=True, sync="float32",
        overrides=(("*.norm.*", "float32"), ("head.*", "float16")),
    )  # fmt: skip
    assert message.dtype_of("blocks.0.norm.weight") == "float32"
    assert message.dtype_of("blocks.0.up.weight") == "bfloat16"
    assert message.dtype_of("mask", buffer=True) is None


def test_the_last_pattern_that_fits_counts():
    message = read_precision({"overrides": [("*", "bf16"), ("*.bias", "fp32")]})
    assert (message.dtype_of("up.weight"), message.dtype_of("up.bias")) == ("bfloat16", "float32")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("bf16-mxied", "did you mean 'bf16-mixed'"),
        ({"comptue": "bf16"}, "did you mean 'compute'"),
        ({"sync": "bfloat61"}, "did you mean 'bfloat16'"),
        ({"base": "fp23"}, "did you mean 'fp32'"),
        ({"compute": "float32"}, "autocast is for bfloat16 and float16"),
        ({"master": "yes"}, "say true or false"),
        ({"overrides": {"*.norm": "int8"}}, "which is no dtype"),
        (16, "precision is a int"),
    ],
)
def test_mistakes_are_named(setting, words):
    with pytest.raises(InputError, match=words):
        read_precision(setting)


def test_a_pattern_that_fits_nothing_is_named_with_the_nearest():
    message = read_precision({"overrides": {"blocks.0.nrom.weight": "float32"}})
    with pytest.raises(InputError, match=r"did you mean 'blocks.0.norm.weight'"):
        message.check_patterns(["blocks.0.norm.weight", "head.weight"])


@pytest.mark.parametrize(
    ("message", "bytes"),
    [
        # parameters, two states and the master
        (None, (4, 8)),
        ("bf16-mixed", (4, 8)),
        ("bf16", (2, 8 + 4)),
        ({"base": "bf16", "master": False}, (2, 4)),
    ],
)
def test_a_plan_counts_what_the_precision_keeps(message, bytes):
    net = torch.nn.Linear(64, 64, bias=False)
    plan = sw.plan(net, example=torch.zeros(8, 64), plan="dp=2", cluster="2xA100-80GB", precision=message)
    memory = plan.predicted["train"]["memory"]
    elements = 64 * 64
    assert tuple(memory[kind] / elements for kind in ("parameters", "optimizer")) == bytes


def test_wires_carry_what_is_asked_for():
    """Gradients in float32 take longer to sum than in bfloat16."""
    net = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False) for _ in range(4)))
    times = {}
    for sync in ("bf16", "fp32"):
        plan = sw.plan(
            net, example=torch.zeros(8, 2048), plan="dp=2", cluster="2xA100-80GB",
            precision={"base": "bf16", "sync": sync},
        )  # fmt: skip
        times[sync] = plan.predicted["train"]["seconds"]
    assert times["bf16"] < times["fp32"]
