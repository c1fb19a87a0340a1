"""Numbers about one stage: computing with them gives such numbers, reading them is refused."""

from __future__ import annotations

import pytest
import torch

from shardwright.errors import InputError
from shardwright.runtime.parameters.stage_numbers import StageNumber, numbered


def stage_number(x):
    return numbered(x.clone(), frozenset({"up.weight"}))


def test_what_is_computed_of_a_number_of_a_stage_is_one_too():
    number = stage_number(torch.tensor([1.0, 2.0], requires_grad=True))
    total = (number * 3).sum(dim=0) + torch.clamp(number, max=1.5).mean()
    assert type(total) is StageNumber
    assert total.shape == () and total.dtype == torch.float32, "what is about it may be read"


@pytest.mark.parametrize("read", [float, bool, int, torch.Tensor.item, torch.Tensor.tolist, lambda x: f"{x:.2f}"])
def test_reading_its_value_is_refused_with_a_remedy(read):
    with pytest.raises(InputError, match="take norms of all stages with"):
        read(stage_number(torch.tensor(1.0)))


def test_it_has_a_gradient():
    x = torch.tensor(2.0, requires_grad=True)
    stage_number(x * x).backward()
    assert x.grad == 4.0
