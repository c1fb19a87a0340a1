"""A LightningModule trained by our strategy ends with the parameters of one that Lightning trains on one device."""

import pytest

from .jobs import all_sorts, fit
from .modules import Annealed, Busy, Net, Numbers, Pair, apart, many, single


def same(actual, expected):
    """Parameters and what was logged."""
    for mine, other in zip(actual, expected, strict=True):
        assert apart(mine, other) < 1e-10


@pytest.fixture(scope="module")
def alone():
    return single(Net)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero3=2", "pp=2", "auto"])
def test_a_run_under_a_plan_is_the_run_of_one_device(pools, alone, plan):
    for result in pools[2].run(fit, "Net", plan, 2, {}, timeout=120):
        same(result, alone)


@pytest.mark.parametrize(
    ("plan", "inputs", "batch"), [("dp=2", "per_replica", 4), ("tp=2", "per_replica", 8), ("tp=2", "per_rank", 4)]
)
def test_ranks_may_load_rows_of_their_own(pools, plan, inputs, batch):
    """Lightning's sampler shuffles and deals them out; what is logged is of the global batch all the same."""
    expected = single(Net, shuffled=True)
    for result in pools[2].run(fit, "Net", plan, 2, {"inputs": inputs, "batch": batch}):
        same(result, expected)


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        ("zero2=2", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}),
        ("tp=2", {"accumulate_grad_batches": 3, "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
        ("pp=2", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}),
    ],
)
def test_gradients_are_accumulated_and_clipped(pools, alone, plan, options):
    expected = single(Net, **options)
    assert apart(expected[0], alone[0]) > 1e-3
    for result in pools[2].run(fit, "Net", plan, 2, options):
        same(result, expected)


@pytest.mark.parametrize("plan", ["dp=2", "pp=2"])
def test_what_a_step_does_besides_computing_is_done(pools, plan):
    expected = single(Busy)
    for result in pools[2].run(fit, "Busy", plan, 2, {}):
        same(result, expected)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_optimizers_that_are_stepped_by_hand(pools, plan):
    expected = single(Pair)
    for result in pools[2].run(fit, "Pair", plan, 2, {}):
        same(result, expected)


def test_optimizers_that_are_stepped_by_hand_on_rows_of_each_group(pools):
    expected, _ = single(Pair, shuffled=True)
    for parameters, _ in pools[2].run(fit, "Pair", "dp=2", 2, {"inputs": "per_replica", "batch": 4}):
        assert apart(parameters, expected) < 1e-10


def test_several_loaders_streams_callbacks_and_loggers(pools):
    expected = many("", 1)
    for result in pools[2].run(all_sorts, "dp=2"):
        same(result, expected)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_a_step_that_can_not_be_compiled_runs_with_compiled_parts(pools, plan):
    expected = single(Numbers)
    for result in pools[2].run(fit, "Numbers", plan, 2, {"parts": ["blocks", "head"]}):
        same(result, expected)


def test_an_attribute_that_changes_with_the_epoch_is_seen(pools, alone):
    expected = single(Annealed)
    assert apart(expected[0], alone[0]) > 1e-4
    for result in pools[2].run(fit, "Annealed", "dp=2", 2, {}):
        same(result, expected)
