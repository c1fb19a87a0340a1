"""A selection of torch's own samples through the whole path; `python -m tests.ops` runs all of them."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from tests.ops.cases import module_samples, op_samples, ops
from tests.ops.expectations import REASONS, REFUSED
from tests.ops.judge import Run, difference, judge
from tests.ops.optimizers import judge_optimizer
from tests.ops.page import PAGE, page
from tests.ops.split import judge_splits

SINGLE = """
    as_strided cat chalf conv exponential fill gradient histc index_select linalg.lu_solve linalg.vector_norm mean
    meshgrid.variadic_tensors nn.functional.conv1d nn.functional.conv_transpose2d nn.functional.gaussian_nll_loss
    nn.functional.nll_loss nn.functional.rrelu nn.functional.alpha_dropout permute rand_like repeat_interleave
    transpose unfold view_copy zero_
""".split()
"""Ops that were wrong or crashed once, and some that did not."""

SPLIT = ["nn.functional.conv2d", "nn.functional.layer_norm", "matmul", "softmax", "nn.functional.cross_entropy", "cat"]


@pytest.mark.parametrize("name", [name for name in SINGLE if name in ops()])
def test_an_op_compiled_for_one_device_is_eager(name, tmp_path):
    for sample in op_samples(name, "float64", 3):
        verdict = judge(sample, tmp_path)
        assert verdict.kind in ("right", "drawn"), f"{sample}: {verdict}"


@pytest.mark.parametrize(
    ("name", "dtype", "number"),
    [("nn.functional.batch_norm", "float32", 8), ("nn.functional.linear_cross_entropy", "bfloat16", 108),
     ("nn.functional.linear_cross_entropy.chunked_none", "bfloat16", 64), ("_segment_reduce.lengths", "float64", 13)],
)  # fmt: skip
def test_a_sample_that_was_wrong_or_died_once_is_eager(name, dtype, number, tmp_path):
    sample = next(islice(op_samples(name, dtype), number, None))
    assert judge(sample, tmp_path).kind == "right"


def test_a_narrow_result_is_right_if_it_is_no_farther_from_float64_than_eager():
    """0.3 in steps of 0.25: eager may round up and a program down."""
    exact, eager = ran(torch.tensor([0.3], dtype=torch.float64)), ran(torch.tensor([0.5]))
    assert difference(ran(torch.tensor([0.25])), eager, exact=exact) == ""
    assert difference(ran(torch.tensor([0.0])), eager, exact=exact)
    assert difference(ran(torch.tensor([torch.nan])), eager, exact=exact)
    assert difference(ran(torch.tensor([0.25])), eager)


def ran(result):
    return Run(result=result, gradients=[], buffers=[])


@pytest.mark.parametrize("name", SPLIT)
def test_an_op_split_over_two_and_three_ranks_is_eager(name):
    for sample in op_samples(name, "float64", 3):
        for ways, verdict in judge_splits(sample):
            assert verdict.kind == "right", f"{sample}, {ways} ways: {verdict}"


@pytest.mark.parametrize("name", ["nn.Linear", "nn.BatchNorm1d", "nn.Conv1d"])
def test_a_module_is_eager(name, tmp_path):
    for sample in module_samples(name, "float32", 2):
        assert judge(sample, tmp_path).kind == "right", str(sample)


def test_an_optimizer_under_a_compiled_model_is_the_optimizer():
    verdicts = [verdict for _, _, verdict in judge_optimizer("Adagrad")]
    assert verdicts
    assert {verdict.kind for verdict in verdicts} == {"right"}


@pytest.mark.parametrize("name", ["nonzero", "to_sparse", "masked_select", "unique"])
def test_what_is_refused_names_the_line_and_the_way_out(name, tmp_path):
    verdicts = [judge(sample, tmp_path) for sample in op_samples(name, "float64", 3)]
    refused = [verdict for verdict in verdicts if verdict.kind == "refused"]
    assert refused
    assert all("cases.py" in verdict.detail and "sw.opaque" in verdict.detail for verdict in refused)


def test_every_refusal_has_a_reason_and_the_page_says_it():
    assert set(REFUSED.values()) == set(REASONS)
    assert PAGE.read_text() == page(), "write docs/ops.md anew: python -m tests.ops.page"
