"""A model from meta, initialised by each rank for its shards alone, has the values of one device."""

from __future__ import annotations

import tempfile

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import shardwright as sw
from shardwright import initialization
from shardwright.errors import InputError
from shardwright.huggingface import empty_model
from shardwright.initialization import initialize, own_init
from tests.parity.threaded import world_of
from tests.runtime.ranks import run_ranks


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8, padding_idx=0)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(self.down(torch.relu(self.up(self.embed(x))))).square().mean()


def trunc(net):
    """An initialisation of one's own, which draws twice and looks at whole matrices."""
    own_init(net)
    nn.init.trunc_normal_(net.up.weight, std=0.02)
    nn.init.orthogonal_(net.down.weight)
    for bias in (net.up.bias, net.down.bias):
        nn.init.zeros_(bias)


def initialised(make, example, plan, **options):
    """The full parameters on each rank, and how large the largest tensor was that was drawn."""
    models, folder = [make() for _ in range(world_of(plan))], tempfile.mkdtemp(prefix="initialised-")

    def rank(number):
        model = sw.parallelize(models[number], plan=plan, example=example, compile={"directory": folder})
        initialize(model, **options)
        return model.full_state_dict()

    return run_ranks(world_of(plan), rank, timeout=200)


def on_meta():
    with torch.device("meta"):
        return Net()


@pytest.mark.parametrize("plan", ["tp=2", "zero3=2", "pp=2"])
@pytest.mark.parametrize("init", [None, trunc])
def test_equal_to_one_device(plan, init):
    torch.manual_seed(3)
    wanted = Net()
    if init is not None:
        torch.manual_seed(3)
        init(wanted)
    for values in initialised(on_meta, (torch.ones(4, 3, dtype=torch.long),), plan, init=init, seed=3):
        assert values.keys() == wanted.state_dict().keys()
        for key, value in wanted.state_dict().items():
            assert torch.equal(values[key], value), key


def test_a_model_of_transformers():
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, use_cache=False
    )
    ids = torch.ones(4, 6, dtype=torch.long)
    wanted = LlamaForCausalLM(config)
    torch.manual_seed(1)
    own_init(wanted)
    for values in initialised(lambda: empty_model(config), {"input_ids": ids, "labels": ids}, "tp=2", seed=1):
        for key, value in wanted.state_dict().items():
            assert torch.equal(values[key], value), key
    assert float(wanted.model.layers[1].mlp.up_proj.weight.detach().std()) == pytest.approx(0.02, rel=0.2)


def test_parameters_that_nothing_initialises_are_named():
    class Bare(Net):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x):
            return super().forward(x) * self.scale.sum()

    def bare():
        with torch.device("meta"):
            return Bare()

    with pytest.raises(InputError, match=r"gives scale no values.*Pass init="):
        initialised(bare, (torch.ones(4, 3, dtype=torch.long),), "tp=2")


def test_an_initialisation_that_looks_at_values_is_refused():
    def init(net):
        net.up.weight.normal_()
        if net.up.weight.sum() > 0:
            net.up.weight.neg_()

    with pytest.raises(InputError, match="must not look at values"):
        initialised(on_meta, (torch.ones(4, 3, dtype=torch.long),), "tp=2", init=init)


def test_memory_is_that_of_one_parameter(monkeypatch):
    bytes_at, inner = [], initialization._Replay._run

    def run(self, step):
        inner(self, step)
        bytes_at.append(sum(memory.nbytes() for memory in self._memory.values()))

    def deep():
        with torch.device("meta"):
            return nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))

    monkeypatch.setattr(initialization._Replay, "_run", run)
    initialised(deep, (torch.ones(4, 32),), "zero3=2")
    assert max(bytes_at) == 32 * 32 * 4
