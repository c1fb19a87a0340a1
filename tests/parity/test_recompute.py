"""Recomputed programs: they compute the same, keep less, and send what the report says they send."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.parallelize import parallelize
from shardwright.plan.lowering import lower
from shardwright.report.communication import totals
from shardwright.runtime.collectives import comm
from shardwright.runtime.model.access import state_of
from shardwright.runtime.parameters import zero3
from tests.models.nets import Residual
from tests.models.transformer import Transformer, TransformerConfig
from tests.models.zoo import ZOO
from tests.plan.graphs import deep_gpt
from tests.plan.recomputing import plan_of, recomputing
from tests.plan.test_recompute import Again
from tests.runtime.ranks import run_ranks

from . import single
from .test_experts import example as moe_example
from .test_experts import mixtral


def gpt(layers: int, **options) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    module = Transformer(TransformerConfig(vocab=64, seq=12, d=32, n_layer=layers, **options))
    return module, (torch.randint(64, (4, 12)), torch.randint(64, (4, 12)))


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        *(("dropout_gpt", plan) for plan in ("dp=2", "tp=2", "sp=2", "zero3=2")),
        ("hf_llama", "sp=2"), ("hf_llama", "zero3=2"), ("hf_bert_pretraining", "dp=2"), ("hf_t5", "tp=2"),
    ],
)  # fmt: skip
def test_recomputed_layers_compute_the_same(name, plan):
    case = ZOO[name](dtype=torch.float64)
    report = sw.verify(case.module, f"{plan},recompute", example=(case.args, case.kwargs), method="threads", steps=1)

    assert report, report


def test_recomputed_experts_compute_the_same():
    report = sw.verify(mixtral(), "ep=2,recompute", example=moe_example(), method="threads", steps=1)

    assert report, report


class Deep(nn.Module):
    """A residual net with a list of blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Residual(4, 4, stride=1) for _ in range(3))
        self.head = nn.Linear(4, 3)

    def forward(self, images, label):
        for block in self.blocks:
            images = block(images)
        return nn.functional.cross_entropy(self.head(images.mean((2, 3))), label)


@pytest.mark.parametrize("plan", ["dp=2,recompute", "zero3=2,recompute"])
def test_batch_norms_update_their_buffers_once(plan):
    torch.manual_seed(0)
    images = torch.randn(4, 4, 6, 6)
    report = sw.verify(Deep(), plan, example=(images, torch.randint(3, (4,))), method="threads", steps=2)

    assert report, report  # buffers are compared after every step


PARTS = {
    "attention of all": [f"blocks.{at}.attn" for at in range(3)],
    "one layer": ["blocks.1"],
    "first layers": ["blocks.0", "blocks.1"],
    "all layers at once, and the embedding": ["blocks", "wte"],
    "parts here, a layer there": ["blocks.0.attn", "blocks.0.up", "blocks.2"],
}


@pytest.mark.parametrize("plan", ["sp=2", "zero3=2"])
@pytest.mark.parametrize("parts", PARTS)
def test_recomputed_parts_compute_the_same(parts, plan):
    module, args = gpt(3, dropout=0.1)
    report = sw.verify(module, recomputing(plan, *PARTS[parts]), example=args, method="threads", ranks=2, steps=1)

    assert report, report


def test_a_module_that_is_called_four_times():
    report = sw.verify(
        Again(), recomputing("dp=2", "block"), example=(torch.randn(2, 4),), method="threads", ranks=2, steps=1
    )

    assert report, report


@pytest.mark.parametrize(("model", "plan"), [("gpt", "tp=2,recompute"), ("hf_llama", "zero3=2,recompute")])
def test_on_processes(pools, tmp_path, model, plan):
    wanted = {"sgd": single.reference(model, "float64", "sgd")}
    payload = single.sendable(model, "float64")
    ranks = pools[2].run(single.parity, model, plan, "float64", wanted, payload, str(tmp_path), timeout=120.0)

    assert ranks == [[], []]


def kept(plan, module, args) -> int:
    """The bytes that autograd keeps for backward, weights left out."""
    by_name: dict[int, int] = {}

    def run(rank):
        model = parallelize(module, plan=plan, example=args)
        own = {p.untyped_storage().data_ptr() for p in state_of(model).parameters.values()}

        def note(x):
            storage = x.untyped_storage()
            if storage.data_ptr() not in own:
                by_name[storage.data_ptr()] = storage.nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            model(*args)

    run_ranks(1, run)
    return sum(by_name.values())


def test_eight_recomputed_layers_keep_a_fraction():
    module, args = gpt(8)
    every = [f"blocks.{at}" for at in range(8)]

    assert kept(recomputing("single", *every), module, args) < 0.4 * kept(recomputing("single"), module, args)


@lru_cache
def issued(text: str, *paths: str) -> Counter[tuple[str, str]]:
    """The collectives of a step that reshards issue, as they run."""
    module, args = gpt(3)

    def run(rank):
        model = parallelize(module, plan=recomputing(text, *paths), example=args)
        with comm.recording() as forward:
            loss = model(*args)
        with comm.recording() as backward:
            loss.backward()
        return Counter((when, kind) for when, value in (("f", forward), ("b", backward)) for kind, *_ in value)

    return run_ranks(2, run)[0]


def reported(text: str, *paths: str) -> Counter[tuple[str, str]]:
    graph = deep_gpt(3)
    actual = totals(lower(graph, plan_of(graph, text, *paths)))
    return Counter({(total.when[0], total.collective): total.count for total in actual if total.when != "once a step"})


@pytest.mark.parametrize(("text", "part"), [("tp=2", ""), ("sp=2", ""), ("tp=2", ".attn"), ("sp=2", ".attn")])
def test_the_report_counts_the_collectives_that_repeat(text, part):
    paths = [f"blocks.{at}{part}" for at in range(3)]

    more = reported(text, *paths) - reported(text)

    assert more == issued(text, *paths) - issued(text)
    if part == "":  # of two sums a layer the second is the end of it, and nothing after it keeps anything
        gathers = {("b", "all_gather"): 6, ("b", "reduce_scatter"): 3}
        assert more == ({("b", "all_reduce"): 3} if text == "tp=2" else gathers)
    else:  # attention ends with its sum, and what enters it is gathered before it
        assert not more


@pytest.mark.parametrize("paths", [["blocks.0", "blocks.1", "blocks.2"], ["blocks.0.attn", "blocks.2.up"], ["blocks"]])
def test_zero3_gathers_no_more_than_without_and_lets_all_layers_go(monkeypatch, paths):
    module, args = gpt(3)
    gathered: list[int] = []
    plain = zero3.GatheredUnit.__init__

    def noted(self, shards):
        gathered.append(id(shards))
        plain(self, shards)

    monkeypatch.setattr(zero3.GatheredUnit, "__init__", noted)

    def run(rank, *paths):
        model = parallelize(module, plan=recomputing("zero3=2", *paths), example=args)
        model(*args).backward()
        (entry,) = model._entries.values()
        return [at.attn.qkv.weight is None for at in entry.stage.blocks]

    assert run_ranks(2, run, *paths) == [[True] * 3] * 2
    again = len(gathered)
    run_ranks(2, run)
    assert again == len(gathered) - again
