"""Optimizers that have shards without parallelize knowing are looked at before their steps, once for each group."""

from __future__ import annotations

import pytest
import torch

from shardwright.errors import InputError
from shardwright.runtime.optimizer import unadopted
from tests.runtime.little import Shards, mesh_of
from tests.runtime.ranks import run_ranks


def test_an_optimizer_is_looked_at_again_when_it_has_got_another_group(monkeypatch):
    collected = []
    monkeypatch.setattr(unadopted, "is_adopted", lambda optimizer: collected.append(optimizer) or False)
    optimizer = torch.optim.SGD([torch.ones(2)], lr=0.1)
    for count in (1, 1):
        unadopted.check_unadopted(optimizer, (), {})
        assert len(collected) == count
    optimizer.add_param_group({"params": [torch.ones(3)]})
    unadopted.check_unadopted(optimizer, (), {})
    assert len(collected) == 2


def test_shards_may_be_updated_element_by_element_and_not_as_whole_tensors():
    def body(rank):
        shards = [leaf for leaf in Shards(mesh_of(1, 2)).p.values() if leaf.requires_grad]
        unadopted.check_unadopted(torch.optim.SGD(shards, lr=0.1), (), {})
        with pytest.raises(InputError, match=r"LBFGS has parameters of a compiled model .*may need more than the same"):
            unadopted.check_unadopted(torch.optim.LBFGS(shards), (), {})

    run_ranks(2, body)
