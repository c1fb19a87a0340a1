"""Plans for many devices, run here at small sizes: the same program, and a wrong one is caught."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from examples.gpt import GPT, GPTConfig
from torch import nn
from transformers import MistralConfig, MistralForCausalLM, MixtralConfig, MixtralForCausalLM

import shardwright as sw
from shardwright.errors import CaptureError, InputError, NonFiniteError, ParityError, PlanError
from shardwright.parallelize import captured_graph
from shardwright.plan.lowering import lower
from shardwright.rehearse import rehearse
from shardwright.rehearse.result import differences
from shardwright.rules import analyse
from shardwright.runtime.collectives import comm
from shardwright.runtime.pipeline import ties
from tests.options import grouped


def gpt(layers=6, vocab=50304):
    """A GPT of a real size, without memory."""
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab=vocab, seq=1024, n_layer=layers, n_head=16, d=2048))
    ids = torch.zeros(512, 1024, dtype=torch.int64, device="meta")
    return model, (ids, ids)


def run(plan, call=None, **options):
    model, example = call or gpt()
    return rehearse(plan, model, example=example, **grouped(**options))


# What is kept, and what becomes small.


def test_a_plan_for_many_devices_runs_on_few():
    rehearsal = run("dp=4,tp=8")

    assert rehearsal.passed, str(rehearsal)
    assert rehearsal.devices == (32, 4)
    assert rehearsal.meshes == (("dp=4 x tp=8", "dp=2 x tp=2"),)
    assert [layers.kept for layers in rehearsal.layers] == [(0, 1, 5)]
    assert {kind for kind, axes in rehearsal.collectives if axes == "tp"} == {"all_reduce"}
    small = dict(rehearsal.sizes)
    assert small[16] % 2 == 0 and small[50304] % 2 == 0 and small[512] % 2 == 0
    assert max(small.values()) < 32


def test_everything_that_training_sees_is_compared():
    rehearsal = run("zero3=64")

    assert {row.kind for row in rehearsal.report.rows} == {"output", "gradient", "parameter"}
    assert "blocks.2.attn.qkv.weight" in {row.name for row in rehearsal.report.rows}
    assert rehearsal.passed, str(rehearsal)


def test_what_does_not_divide_does_not_divide_on_three_either():
    rehearsal = run("tp=8", gpt(4, vocab=50257))

    assert rehearsal.passed, str(rehearsal)
    assert rehearsal.meshes == (("tp=8", "tp=3"),)
    assert dict(rehearsal.sizes)[50257] % 3


@pytest.mark.parametrize(("plan", "ranks"), [("pp=4,dp=2,tp=4", 12), ("pp=4,zbv", 3), ("pp=4,interleaved,zero1=2", 6)])
def test_a_pipeline_keeps_its_schedule_and_its_first_and_last_ranks(plan, ranks):
    rehearsal = run(plan, steps=2)

    assert rehearsal.passed, str(rehearsal)
    assert rehearsal.devices[1] == ranks
    assert rehearsal.microbatches == (16, 6)
    assert rehearsal.schedule in ("1f1b", "zbv", "interleaved")


def test_recomputed_layers_are_a_kind_of_their_own():
    model, example = gpt()
    plan = sw.plan(model, example=example, plan="dp=8", cluster=8)
    (stage,) = plan.entries["train"]
    recompute = ("blocks.1", "blocks.2", "blocks.3.mlp")
    plan = dataclasses.replace(plan, entries={"train": (dataclasses.replace(stage, recompute=recompute),)})

    rehearsal = rehearse(plan, model, example=example)

    assert rehearsal.passed, str(rehearsal)
    assert rehearsal.layers == ()  # two, two and one, and one more: none is in the middle of its kind


def test_what_an_op_computes_sizes_of_stays_at_its_size():
    class Pictures(nn.Module):
        def __init__(self):
            super().__init__()
            self.patches = nn.Conv2d(3, 512, 16, stride=16)
            self.head = nn.Linear(512, 1000)

        def forward(self, x, y):
            return F.cross_entropy(self.head(self.patches(x).flatten(2).mean(2)), y)

    with torch.device("meta"):
        model, x, y = Pictures(), torch.zeros(256, 3, 224, 224), torch.zeros(256, dtype=torch.int64)

    rehearsal = rehearse("dp=4,tp=8", model, example=(x, y))

    assert rehearsal.passed, str(rehearsal)
    assert any("224" in note and "patches / conv2d" in note for note in rehearsal.kept)
    assert dict(rehearsal.sizes)[512] < 32


def test_experts_go_where_their_tokens_are():
    config = MixtralConfig(
        vocab_size=32000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, num_attention_heads=16,
        num_key_value_heads=8, num_local_experts=8, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model, ids = MixtralForCausalLM(config), torch.zeros(64, 256, dtype=torch.int64)
    model.set_experts_implementation("eager")
    example = ((), {"input_ids": ids, "attention_mask": ids, "labels": ids})

    rehearsal = rehearse("dp=2,ep=4,tp=2", model.train(), example=example, compile={"outputs": "scalars"}, steps=1)

    assert rehearsal.passed, str(rehearsal)
    assert all(parameter.is_meta for parameter in model.parameters())  # the user's model is as it was
    assert rehearsal.meshes == (("dp=2 x ep=4 x tp=2", "dp=2 x ep=2 x tp=2"),)


@pytest.mark.parametrize("data", ["attention_mask", "position_ids"])
def test_a_window_stays_a_window(data):
    config = MistralConfig(
        vocab_size=32000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, num_attention_heads=16,
        num_key_value_heads=8, sliding_window=1024, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model, ids = MistralForCausalLM(config), torch.zeros(64, 4096, dtype=torch.int64)
    example = ((), {"input_ids": ids, data: ids, "labels": ids})

    rehearsal = rehearse("dp=2,tp=4", model.train(), example=example, compile={"outputs": "scalars"}, steps=1)

    assert rehearsal.passed, str(rehearsal)
    assert dict(rehearsal.sizes)[4096] < 64


def test_a_plan_in_a_precision_keeps_its_casts(tmp_path):
    model, example = gpt(4)
    plan = sw.plan(model, example=example, plan="zero2=8,tp=2", cluster="2x8xA100-80GB", precision="bf16-mixed")
    plan.save(tmp_path / "plan.json")

    rehearsal = rehearse(tmp_path / "plan.json", model, example=example)

    assert rehearsal.passed, str(rehearsal)
    assert rehearsal.devices == (16, 4)


# A wrong program is caught.


def test_a_sum_that_is_left_out_is_caught(monkeypatch):
    monkeypatch.setattr(comm, "all_reduce", lambda x, group, **rest: x)
    monkeypatch.setattr(comm, "all_reduce_", lambda x, group: x)

    rehearsal = run("tp=8")

    assert not rehearsal.passed
    with pytest.raises(ParityError, match="gradient wte"):
        rehearsal.raise_on_failure()


def test_tied_weights_whose_stages_do_not_communicate_are_caught(monkeypatch):
    right = ties._added

    def forgetful(tie, own, coming):
        right(tie, own, coming)
        return own

    monkeypatch.setattr(ties, "_added", forgetful)

    rehearsal = run("pp=4", steps=1)

    assert {row.name for row in rehearsal.report.failures} == {"wte.weight"}


def test_a_small_program_that_does_something_else_is_reported():
    model, example = gpt(4)
    graph = captured_graph(model, example).graph
    analysis = analyse(graph)
    program = lower(graph, sw.plan(model, example=example, plan="tp=8", cluster=8), analysis)
    fewer = dataclasses.replace(program, body=tuple(op for op in program.body if op.target != "comm.all_reduce"))

    assert differences([program], [program]) == []
    (line,) = differences([program], [fewer])
    assert "comm.all_reduce tp" in line


def test_a_program_that_is_not_the_plans_does_not_pass():
    rehearsal = run("tp=2", gpt(4), steps=1)

    assert rehearsal.passed
    other = dataclasses.replace(rehearsal, changed=("stage 0: something else",))
    assert not other.passed
    with pytest.raises(ParityError, match="stage 0: something else"):
        other.raise_on_failure()


def test_training_that_leaves_all_bounds_is_no_proof():
    class Explodes(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(8, 8)

        def forward(self, x):
            return (1e12 * self.up(x)).exp().sum()

    with pytest.raises(NonFiniteError, match="does not train for 3 steps"):
        rehearse("dp=2", Explodes(), example=(torch.randn(8, 8),))


# What is refused.


def test_a_search_is_not_a_plan():
    with pytest.raises(InputError, match="needs an existing plan"):
        run("auto")


@pytest.mark.parametrize(
    ("option", "message"), [({"steps": 0}, "trains nothing"), ({"optimizer": "adam"}, "use 'sgd'")]
)
def test_training_that_is_none_is_refused(option, message):
    with pytest.raises(InputError, match=message):
        run("tp=8", **option)


def test_a_plan_for_another_model_is_refused():
    model, example = gpt(4)
    plan = sw.plan(model, example=example, plan="tp=8", cluster=8)

    with pytest.raises(PlanError, match="another graph"):
        run(plan, gpt(6))


def test_another_batch_than_the_plans_is_refused():
    model, (ids, _) = gpt(4)
    plan = sw.plan(model, example=(ids, ids), plan="dp=8,zero1=8", cluster=64)

    with pytest.raises(PlanError, match=r"must have the size that the plan was made for \(--batch"):
        run(plan, (model, (ids[:12], ids[:12])))


def test_microbatches_that_are_batches_of_their_own_are_refused():
    model, example = gpt(4)
    plan = sw.plan(model, example=example, plan="dp=2", cluster=2)

    with pytest.raises(PlanError, match=r'PipelineOptions\(semantics="local"\) has no rehearsal'):
        run(dataclasses.replace(plan, local=True, microbatches=2), (model, example))


def test_what_stays_too_large_for_a_laptop_is_refused_before_it_is_allocated():
    class Pictures(nn.Module):
        def __init__(self):
            super().__init__()
            self.patches = nn.Conv2d(3, 512, 16, stride=16)

        def forward(self, x):
            return self.patches(x).square().mean()

    with torch.device("meta"):
        model, x = Pictures(), torch.zeros(256, 3, 16384, 16384)

    with pytest.raises(PlanError, match=r"still has [\d,]+ elements.*16384.* for patches / conv2d"):
        rehearse("dp=8", model, example=(x,))


def test_a_branch_over_data_is_refused_with_its_line():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(8, 8)

        def forward(self, x):
            y = torch.cond(x.sum() > 0, lambda a: a * 2, lambda a: a - 1, (self.up(x),))
            return y.square().mean()

    with pytest.raises(PlanError, match="has subgraphs, which can't be scaled down"):
        rehearse("dp=2", Net(), example=(torch.randn(8, 8),))


def test_what_can_not_be_captured_is_refused():
    class Net(nn.Module):
        def forward(self, x):
            return x.sum() if x.sum() > 0 else x.mean()

    with pytest.raises(CaptureError):
        rehearse("dp=2", Net(), example=(torch.randn(8, 8),))
