"""Recomputed programs: they compute the same, keep less, and send what the report says they send."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.lower import lower
from shardwright.parallelize import parallelize
from shardwright.report.traffic import totals
from shardwright.runtime import comm
from tests.models.nets import Residual
from tests.models.transformer import Transformer, TransformerConfig
from tests.models.zoo import ZOO
from tests.plan.graphs import deep_gpt
from tests.plan.recomputing import plan_of, recomputing
from tests.runtime.ranks import run_ranks

from . import single
from .test_experts import example as moe_example
from .test_experts import mixtral


def gpt(layers: int, **options) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    module = Transformer(TransformerConfig(vocab=64, seq=12, d=32, n_layer=layers, **options))
    return module, (torch.randint(64, (4, 12)), torch.randint(64, (4, 12)))


@pytest.mark.parametrize("plan", ["dp=2,recompute", "tp=2,recompute", "sp=2,recompute", "zero3=2,recompute"])
@pytest.mark.parametrize("name", ["dropout_gpt", "hf_llama", "hf_bert_pretraining", "hf_t5"])
def test_recomputed_layers_compute_the_same(name, plan):
    case = ZOO[name](dtype=torch.float64)
    report = sw.verify(case.module, plan, example=(case.args, case.kwargs), method="threads", steps=2)

    assert report, report


@pytest.mark.parametrize("plan", ["ep=2,recompute", "tp=2,recompute"])
def test_recomputed_experts_compute_the_same(plan):
    report = sw.verify(mixtral(), plan, example=moe_example(), method="threads", steps=1)

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


@pytest.mark.parametrize("plan", ["dp=2,recompute", "tp=2,recompute", "zero3=2,recompute"])
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


@pytest.mark.parametrize("plan", ["tp=2", "sp=2", "zero3=2"])
@pytest.mark.parametrize("parts", PARTS)
def test_recomputed_parts_compute_the_same(parts, plan):
    module, args = gpt(3, dropout=0.1)
    report = sw.verify(
        module, recomputing(plan, *PARTS[parts]), example=args, method="threads", size=2, steps=1
    )

    assert report, report


def test_a_module_that_is_called_four_times():
    case = ZOO["repeated"](dtype=torch.float64)
    report = sw.verify(case.module, recomputing("dp=2", "block"), example=case.args, method="threads", size=2)

    assert report, report


@pytest.mark.parametrize(("model", "plan"), [("gpt", "tp=2,recompute"), ("hf_llama", "zero3=2,recompute")])
def test_on_processes(pools, tmp_path, model, plan):
    wanted = {"sgd": single.reference(model, "float64", "sgd")}
    held = single.sendable(model, "float64")
    ranks = pools[2].run(single.parity, model, plan, "float64", wanted, held, str(tmp_path), timeout=120.0)

    assert ranks == [[], []]


def kept(plan, module, args) -> int:
    """The bytes that autograd keeps for backward, weights left out."""
    found: dict[int, int] = {}

    def run(rank):
        model = parallelize(module, plan=plan, example=args)
        own = {p.untyped_storage().data_ptr() for p in model._ready().parameters.values()}

        def note(x):
            storage = x.untyped_storage()
            if storage.data_ptr() not in own:
                found[storage.data_ptr()] = storage.nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            model(*args)

    run_ranks(1, run)
    return sum(found.values())


def test_eight_recomputed_layers_keep_a_fraction():
    module, args = gpt(8)
    every = [f"blocks.{at}" for at in range(8)]
    none, half, all_ = (kept(recomputing("single", *paths), module, args) for paths in ([], every[:4], every))

    assert all_ < 0.4 * none
    assert all_ < half < none


@pytest.mark.parametrize("text", ["tp=2", "sp=2"])
@pytest.mark.parametrize("part", ["", ".attn"])
def test_the_report_counts_the_collectives_that_repeat(text, part):
    module, args = gpt(3)
    paths = [f"blocks.{at}{part}" for at in range(3)]

    def run(rank):
        model = parallelize(module, plan=recomputing(text, *paths), example=args)
        with comm.recording() as forward:
            loss = model(*args)
        with comm.recording() as backward:
            loss.backward()
        return [(when, kind) for when, held in (("forward", forward), ("backward", backward)) for kind, *_ in held]

    ran = run_ranks(2, run)[0]
    graph = deep_gpt(3)
    said = [total for total in totals(lower(graph, plan_of(graph, text, *paths))) if total.when != "once a step"]

    assert said and all(ran.count((total.when, total.collective)) >= total.count for total in said), (ran, said)


def test_zero3_lets_go_of_the_layers_that_backward_gathered_again():
    module, args = gpt(3)

    def run(rank):
        model = parallelize(module, plan="zero3=2,recompute", example=args)
        model(*args).backward()
        (entry,) = model._entries.values()
        return [at.attn.qkv.weight is None for at in entry.stage.blocks]

    assert run_ranks(2, run) == [[True] * 3] * 2
