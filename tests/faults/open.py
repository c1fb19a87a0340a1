"""Faults that the test named here should notice, and does not yet: what is to be done."""

from .fault import Fault
from .lower import SECTION4, TIDY
from .rules import LOOKUPS, VIEWS, drawn

OPEN = (
    Fault(
        "sums are fused that something reads between",
        TIDY,
        "if len(users[before.outputs[0]]) > 1 or before.outputs[0] in needed:",
        "if before.outputs[0] in needed:",
        "lower/test_tidy.py",
    ),
    Fault(
        "products of a frozen bias lose it",
        "lower/overlap.py",
        'biases = tuple(columns["bias"]) if any(columns["bias"]) else None',
        "biases = None",
        f"{SECTION4}::test_a_bias_after_a_split_product_is_added_once_and_not_tp_times",
    ),
    Fault(
        "the index of a gather reads a split dim",
        LOOKUPS,
        "name if at != dim and held == size else str(size)",
        "name if held == size else str(size)",
        drawn("gather"),
    ),
    Fault(
        "x + 1 is linear",
        "rules/pointwise.py",
        "return pointwise(call, [1, 1] if both else [None])",
        "return pointwise(call, [1, 1] if both else [1])",
        drawn("aten.add.Tensor"),
    ),
    Fault(
        "padding with a number is linear",
        VIEWS,
        'linear=not call.op.argument("value", 0))',
        "linear=True)",
        drawn("constant_pad_nd"),
    ),
    Fault(
        "a crossing value is not settled",
        "lower/place.py",
        "return settled(made) if wanted is None else wanted",
        "return made if wanted is None else wanted",
        "lower/test_pipeline.py",
    ),
    Fault(
        "a dim before the padded one stays whole",
        VIEWS,
        "len(call.shape) - 1 - at // 2 for",
        "len(call.shape) - 2 - at // 2 for",
        drawn("constant_pad_nd"),
    ),
    Fault(
        "a stack is along another dim",
        VIEWS,
        "result = [*names[:dim], str(len(call.inputs)), *names[dim:]]",
        "result = [*names, str(len(call.inputs))]",
        drawn("stack"),
    ),
)
