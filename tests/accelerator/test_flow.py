"""Everything a user does, on ranks whose device is not the CPU. `python -m tests.accelerator` has all plans."""

import pytest
import torch

from . import jobs


@pytest.mark.parametrize("plan", ["tp=2", "zero3=2", "pp=2"])
def test_plans_match_one_device(plan, ranks):
    for passed, report in ranks.run(jobs.check_plan, plan, {}, timeout=120):
        assert passed, report


def test_a_loop_is_saved_and_loaded_by_another_plan(ranks, tmp_path):
    expected = torch.tensor(ranks.run(jobs.train_alone, torch.float64, timeout=120)[0], dtype=torch.float64)
    losses = ranks.run(jobs.train, "zero2=2", "exact", str(tmp_path), timeout=120)[0]
    assert torch.allclose(torch.tensor(losses, dtype=torch.float64), expected, rtol=0, atol=1e-10)
    resumed = ranks.run(jobs.resume, "tp=2", str(tmp_path), timeout=120)[0]
    assert torch.allclose(torch.tensor(resumed, dtype=torch.float64), expected[2:], rtol=0, atol=1e-10)


@pytest.mark.parametrize("how", ["scaler", "bf16"])
def test_scaled_and_mixed_precision(how, ranks, tmp_path):
    expected = torch.tensor(ranks.run(jobs.train_alone, torch.float32, timeout=120)[0])
    losses = torch.tensor(ranks.run(jobs.train, "dp=2", how, str(tmp_path), timeout=120)[0])
    bound = 1e-5 if how == "scaler" else 2 * torch.finfo(torch.bfloat16).eps
    assert torch.allclose(losses, expected, rtol=bound, atol=0)
