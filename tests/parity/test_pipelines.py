"""Pipelines: every model under every schedule and number of ranks, on gloo processes, against one device."""

import copy
from itertools import product
from pathlib import Path

import pytest
import torch

from shardwright.compile import Compiler, CompilerSettings
from shardwright.errors import LoweringError, PlanError
from shardwright.plan.request import PlanRequest
from shardwright.plan.search_options import SearchOptions
from shardwright.runtime.model.parallel_model import ParallelModel
from shardwright.runtime.world import start
from tests.models.zoo import loss_of

from . import single

LIMIT = 120.0
MODELS = ("gpt_ignore", "hf_t5", "unet", "masked")
PLANS = {  # ranks, microbatches
    "pp=2,gpipe": (2, 2),
    "pp=2,1f1b": (2, 4),
    "pp=2,interleaved": (2, 4),
    "pp=2,zb": (2, 4),
    "pp=4": (4, 2),
    "pp=2,zbv": (2, 4),
    "pp=2,dp=2": (4, 2),
    "pp=2,tp=2": (4, 2),
    "pp=1+3,dp": (4, 2),
}


def faults(pools, tmp_path, model, plan, ranks, microbatches, kinds=("sgd",), dtype="float64"):
    wanted = {kind: single.reference(model, dtype, kind) for kind in kinds}
    payload = single.sendable(model, dtype)
    arguments = (model, plan, dtype, wanted, payload, str(tmp_path), microbatches)
    answers = pools[ranks].run(single.parity, *arguments, timeout=LIMIT)
    assert len(answers) == ranks
    return [fault for answer in answers for fault in answer]


@pytest.mark.parametrize(
    ("model", "plan"), [*product(MODELS, PLANS), *product(["hf_llama"], ["pp=2,zb", "pp=4", "pp=2,tp=2"])]
)  # a llama is a chain of layers, as the first model is
def test_a_pipeline_trains_as_one_device(pools, tmp_path, model, plan):
    ranks, microbatches = PLANS[plan]
    named = f"{model}:6" if "+" in plan else model  # six rows divide by three devices and two microbatches
    assert faults(pools, tmp_path, named, plan, ranks, microbatches) == []


@pytest.mark.parametrize("model", ["gpt", "repeated", "hf_gpt2", "hf_bert_pretraining", "regularized", "hf_vit"])
def test_so_do_other_models_on_two_stages(pools, tmp_path, model):
    assert faults(pools, tmp_path, model, "pp=2", 2, 2, ("sgd", "adamw")) == []


@pytest.mark.parametrize("plan", ["pp=4", "pp=2,interleaved", "pp=2,zbv"])
def test_layers_of_a_stage_are_a_loop(pools, tmp_path, plan):
    assert faults(pools, tmp_path, "gpt_deep", plan, PLANS[plan][0], 2) == []
    texts = [path.read_text() for path in tmp_path.glob("**/*.py")]
    assert texts and any("for at in self.blocks" in text for text in texts)


@pytest.mark.parametrize(
    "plan", ["pp=2,sp=2", "pp=2,zero1=2", "pp=2,zero2=2", "pp=2,zero3=2", "pp=2,tp=2,zb", "pp=2,dp=2,recompute"]
)
def test_stages_may_do_what_single_devices_do(pools, tmp_path, plan):
    assert faults(pools, tmp_path, "gpt", plan, 4, 2) == []


def test_microbatches_without_stages(pools, tmp_path):
    assert faults(pools, tmp_path, "gpt_ignore", "dp=2", 2, 2) == []


def test_batch_norm_sees_the_whole_batch_if_it_is_not_cut(pools, tmp_path):
    assert faults(pools, tmp_path, "resnet", "pp=2", 2, 1) == []


@pytest.mark.parametrize("model", ["resnet", "contrastive"])
def test_what_needs_the_whole_batch_refuses_microbatches(pools, tmp_path, model):
    with pytest.raises(LoweringError, match='semantics="local"'):
        faults(pools, tmp_path, model, "pp=2", 2, 2)


def trained_in_parts(model, parts):
    """The original run on one part of the batch after the other, losses averaged."""
    case = single.build(model, "float64")
    optimizer = single.optimizer_of("sgd", case.module.parameters())
    trace = single.Trace()
    for _ in range(single.STEPS):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for rows in zip(*(tensor.chunk(parts) for tensor in case.args), strict=True):
            loss = loss_of(case.module(*rows)) / parts
            loss.backward()
            total += loss.detach()
        trace.losses.append(total)
        trace.gradients.append({key: copy.copy(p.grad) for key, p in case.module.named_parameters()})
        for parameter in case.module.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad.clone()
        optimizer.step()
    trace.parameters = {key: p.detach().clone() for key, p in case.module.named_parameters()}
    trace.buffers = {key: b.detach().clone() for key, b in case.module.named_buffers()}
    return trace


def local_parity(rank, model, plan, parts, wanted, directory):
    case = single.build(model, "float64")
    optimizer = single.optimizer_of("sgd", case.module.parameters())
    keys = [key for key, _ in case.module.named_parameters()]
    request = PlanRequest.read(plan, options=SearchOptions(microbatches=parts, local=True))
    settings = CompilerSettings(request=request, directory=Path(directory))
    compiler = Compiler(case.module, optimizer, start(), settings)
    mine = single.trained(ParallelModel(compiler), case, optimizer, keys)
    return single.faults_of(mine, wanted, 1e-10)


@pytest.mark.parametrize("model", ["resnet", "contrastive"])
def test_microbatches_may_be_batches_of_their_own(pools, tmp_path, model):
    wanted = trained_in_parts(model, 2)
    assert pools[2].run(local_parity, model, "pp=2", 2, wanted, tmp_path, timeout=LIMIT) == [[], []]


@pytest.mark.parametrize(
    ("plan", "microbatches", "message"),
    [
        ("pp=2", 3, "a batch of 4 does not divide into 3 microbatches; 1, 2, 4 would do"),
        ("pp=2", 8, "8 microbatches are more than the batch has samples"),
        ("pp=2,interleaved=9", 2, "18 stages are asked for, and the model can be cut in"),
        ("pp=2,dp", 2, "does not say how many devices dp has"),
        ("pp=1+3", 2, "say how each uses them"),
        ("gpipe", 2, "no pipeline"),
    ],
)
def test_wishes_that_can_not_be(pools, tmp_path, plan, microbatches, message):
    with pytest.raises(PlanError, match=message):
        faults(pools, tmp_path, "mlp", plan, 4 if "=2," in plan and "interleaved" not in plan else 2, microbatches)
