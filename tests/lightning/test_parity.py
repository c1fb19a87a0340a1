"""A LightningModule trained by our strategy ends with the parameters of one that Lightning trains on one device."""

import pytest

from .jobs import fit
from .modules import Net, apart, single


@pytest.fixture(scope="module")
def alone():
    return single(Net)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero3=2", "pp=2"])
def test_a_run_under_a_plan_is_the_run_of_one_device(pools, alone, plan):
    for parameters, metrics in pools[2].run(fit, "Net", plan, 2, {}, timeout=120):
        assert apart(parameters, alone[0]) < 1e-10
        assert apart(metrics, alone[1]) < 1e-10
