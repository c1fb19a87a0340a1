"""Batch norms by the statistics of each rank's own samples: what DDP computes; refused where it can't be compared."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import shardwright as sw
from shardwright.errors import InputError, PlanError
from tests.runtime.ranks import run_processes

LOCAL = sw.CompileOptions(batch_norm="local")


class Net(nn.Module):
    """A batch norm that is one line of its module, and one whose statistics are averaged over all batches."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=0.3)
        self.down, self.over_all, self.head = nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        return nn.functional.cross_entropy(self.head(self.over_all(self.down(h))), y)


def make_net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def make_batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 3, 6, 6, generator=generator, dtype=torch.float64) + at, torch.arange(8) % 5) for at in range(3)
    ]


def train(rank: int, folder: str) -> dict[str, dict[str, Tensor]]:
    """The state after three steps by DDP and by two plans, as each has it."""
    states = {}
    replicated = DistributedDataParallel(make_net())
    optimizer = torch.optim.SGD(replicated.parameters(), lr=0.1)
    for x, y in make_batches():
        optimizer.zero_grad()
        replicated(x.chunk(2)[rank], y.chunk(2)[rank]).backward()
        optimizer.step()
    states["ddp"] = copy.deepcopy(replicated.module.state_dict())
    for plan in ("dp=2", "zero3=2"):
        model = make_net()
        options = sw.CompileOptions(batch_norm="local", directory=folder)
        model, optimizer = sw.parallelize(
            model, torch.optim.SGD(model.parameters(), lr=0.1), example=make_batches()[0], plan=plan, compile=options
        )
        assert model.plan.batch_norm == "local"
        for x, y in make_batches():
            optimizer.zero_grad()
            model(x, y).backward()
            optimizer.step()
        states[plan] = {key: value.clone() for key, value in model.full_state_dict().items()}
    return states


def test_the_result_is_that_of_ddp(tmp_path):
    first, second = run_processes(2, train, str(tmp_path), timeout=300)
    for plan in ("dp=2", "zero3=2"):
        for key, value in first["ddp"].items():  # its first rank has the buffers that count
            torch.testing.assert_close(first[plan][key], value, rtol=1e-10, atol=1e-10, msg=f"{plan}: {key}")
            assert torch.equal(first[plan][key], second[plan][key])
    (generated,) = [
        text for file in tmp_path.rglob("*.py") if "over=self.dp, local=True" in (text := file.read_text())
    ][:1]
    assert "local=True)" in generated


def test_the_plan_says_it_and_is_refused_where_global_statistics_are_asked_for(tmp_path):
    plan = sw.plan(make_net(), example=make_batches()[0], plan="dp=2", cluster=2, compile=LOCAL)
    assert any("each rank's own samples" in note for note in plan.notes)
    plan.save(tmp_path / "plan.json")

    assert '"batch_norm": "local"' in (tmp_path / "plan.json").read_text()
    for source in (plan, tmp_path / "plan.json"):
        with pytest.raises(PlanError, match='batch_norm="local"'):
            sw.plan(make_net(), example=make_batches()[0], plan=source, cluster=2)
    again = sw.plan(make_net(), example=make_batches()[0], plan=tmp_path / "plan.json", cluster=2, compile=LOCAL)
    assert again.batch_norm == "local"


def test_it_is_priced_without_messages_of_its_norms():
    messages = {}
    for way in ("global", "local"):
        plan = sw.plan(make_net(), example=make_batches()[0], plan="dp=2", cluster=2, compile={"batch_norm": way})
        messages[way] = plan.predicted["train"]["seconds"]
    assert messages["local"] < messages["global"]


def test_what_compares_with_one_device_refuses_it():
    with pytest.raises(InputError, match=r"is not for sw\.verify: the original normalizes the global batch"):
        sw.verify(make_net(), example=make_batches()[0], plan="dp=2", compile=LOCAL)
    with pytest.raises(InputError, match="batch_norm"):
        sw.rehearse("dp=2", make_net(), example=make_batches()[0], compile=LOCAL)
