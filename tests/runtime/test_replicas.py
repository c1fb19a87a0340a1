"""A replica that has drifted is found by one changed bit, and named."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import shardwright as sw
from shardwright.errors import DriftError
from shardwright.runtime.faults.replicas import check_replicas, hash_of
from tests.runtime.ranks import run_ranks


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.norm = nn.LayerNorm(4)
        self.register_buffer("table", torch.ones(4))

    def forward(self, x):
        return (self.down(self.up(self.norm(x) * self.table).tanh())).square().mean()


def run(plan, size, change, folder, kind=Net):
    """What each rank says of a model of which one rank changes something."""
    torch.manual_seed(0)
    net, x = kind(), torch.randn(4, 4)

    def act(rank):
        module = copy.deepcopy(net)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model, optimizer = sw.parallelize(module, optimizer, plan=plan, example=x, compile={"directory": folder})
        model(x).backward()
        optimizer.step()
        check_replicas(model)
        with torch.no_grad():
            change(rank, model)
        try:
            check_replicas(model)
        except DriftError as error:
            return str(error)
        return None

    return run_ranks(size, act)


def test_one_element_of_a_replica(tmp_path):
    def change(rank, model):
        if rank == 1:
            model.down.weight[2, 3] *= 1 + 1e-7

    message = run("dp=4", 4, change, tmp_path)
    assert len(set(message)) == 1
    assert message[0].splitlines()[1:] == ["  - down.weight has other values on rank 1 than on rank 0, 2, 3"]


def test_shards_are_compared_with_equal_shards(tmp_path):
    def change(rank, model):
        if rank == 3:
            model.up.weight.add_(1)
            model.norm.weight[1] = 7

    (message,) = set(run("dp=2,tp=2", 4, change, tmp_path))
    lines = message.splitlines()[1:]
    assert len(lines) == 2
    assert any("norm.weight has other values on rank 3 than on rank 0, 1, 2" in line for line in lines)
    assert any("up.weight[4:8, :] has other values on rank 3 than on rank 1" in line for line in lines)


def test_what_only_one_rank_holds_can_not_drift(tmp_path):
    def change(rank, model):
        if rank == 1:
            model.up.weight.add_(1)

    assert run("zero3=2", 2, change, tmp_path) == [None, None]


def test_buffers_too(tmp_path):
    def change(rank, model):
        model.table[0] = rank

    (message,) = set(run("tp=2", 2, change, tmp_path))
    assert "table has other values on rank 1 than on rank 0" in message


class Tied(nn.Module):
    """The first and the last layer share a weight."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.middle(self.first(x)).tanh()).square().mean()


def test_a_parameter_that_two_stages_share(tmp_path):
    def change(rank, model):
        if rank == 1:
            model.last.weight[0, 0] += 1e-6

    (message,) = set(run("pp=2", 2, change, tmp_path, Tied))
    assert message.splitlines()[1:] == ["  - first.weight has other values on rank 1 than on rank 0"]


@given(st.integers(1, 300), st.data(), st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.bool]))
def test_a_hash_sees_values_and_places(size, data, dtype):
    values = torch.rand(size).gt(0.5) if dtype is torch.bool else torch.randn(size).to(dtype)
    at = data.draw(st.integers(0, size - 1))
    changed = values.clone()
    changed[at] = ~changed[at] if dtype is torch.bool else changed[at] + 1
    assert hash_of(values) == hash_of(values.clone())
    assert (hash_of(values) == hash_of(changed)) == torch.equal(values, changed)
    turned = values.roll(1)
    assert (hash_of(values) == hash_of(turned)) == torch.equal(values, turned)


def test_hashes_of_zeros_and_of_nothing_differ_by_length():
    assert len({hash_of(torch.zeros(n)) for n in range(50)}) == 50
    assert hash_of(torch.zeros(())) != hash_of(torch.ones(()))


def test_alone_there_is_nothing_to_compare():
    check_replicas(Net())
    with pytest.raises(TypeError):
        check_replicas()
