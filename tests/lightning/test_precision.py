"""Lightning's precision plugins. What is narrow is rounded in another order, but no more than narrowness costs."""

import pytest
import torch

from .jobs import narrow
from .modules import LARGE, Net, apart, seeded


@pytest.fixture(scope="module")
def exact():
    return narrow(0, "", 1, {"precision": "32-true"})[0]


@pytest.mark.parametrize("plan", ["tp=2", "pp=2"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_a_plan_costs_less_than_the_precision_does(pools, exact, plan, precision):
    alone, _ = narrow(0, "", 1, {"precision": precision})
    for parameters, _ in pools[2].run(narrow, plan, 2, {"precision": precision}):
        assert apart(parameters, alone) < 1.5 * apart(alone, exact)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_submodules_run_under_autocast(pools, plan):
    """One of them is called with what another made, narrow, and with the data itself."""
    options = {"name": "Pair", "precision": "bf16-mixed"}
    exact, _ = narrow(0, "", 1, {**options, "precision": "32-true"})
    alone, _ = narrow(0, "", 1, options)
    for parameters, _ in pools[2].run(narrow, plan, 2, options):
        assert apart(parameters, alone) < 1.5 * apart(alone, exact)


@pytest.mark.parametrize("plan", ["tp=2", "zero3=2", "pp=2"])
def test_ranks_skip_the_same_steps_of_float16(pools, plan):
    (first, scale), (second, other) = pools[2].run(narrow, plan, 2, {"precision": None, "max_epochs": 4})
    assert scale == other < LARGE  # some steps were skipped
    assert apart(first, second) == 0.0
    start = seeded(Net, torch.float32).state_dict()
    assert all(apart({key: value}, {key: start[key]}) > 0 for key, value in first.items())  # and some were not
    if plan == "tp=2":  # microbatches have smaller gradients, so that a pipeline need not come down as far
        alone, expected = narrow(0, "", 1, {"precision": None, "max_epochs": 4})
        assert scale == expected
        assert apart(first, alone) < 0.02
