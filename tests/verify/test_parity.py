"""`verify` passes where the program is right, and names the tensor where it is not."""

import copy

import pytest
import torch
from torch import nn

from shardwright.errors import InputError, ParityError, PlanError
from shardwright.parallelize import plan as make_plan
from shardwright.runtime.algorithms import linears
from shardwright.runtime.collectives import comm
from shardwright.verify import verify
from tests.models.nets import RATE, SIGNS, Exact
from tests.models.zoo import ZOO
from tests.options import grouped


def check(name, plan, **options):
    module, args, kwargs = ZOO[name]()
    return verify(module, plan, example=(args, kwargs), **grouped(**options))


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero2=2", "zero3=2"])
def test_an_mlp_is_the_same_under_every_plan(plan):
    report = check("mlp", plan)

    assert report.passed, str(report)
    assert {row.kind for row in report.rows} == {"output", "gradient", "parameter"}
    assert {row.name for row in report.rows if row.kind == "gradient"} == {
        "up.weight", "up.bias", "down.weight", "down.bias",
    }  # fmt: skip


def test_without_a_plan_one_of_each_kind_is_tried():
    module, args, kwargs = ZOO["mlp"]()
    report = verify(module, example=(args, kwargs), steps=1)

    assert report.passed, str(report)
    assert list(dict.fromkeys(row.plan for row in report.rows)) == ["dp=2", "tp=2", "zero3=2", "pp=2"]


def test_without_a_plan_a_fault_of_one_kind_is_a_fault(monkeypatch):
    monkeypatch.setattr(comm, "all_reduce_", lambda x, group: x)
    module, args, kwargs = ZOO["mlp"]()
    report = verify(module, example=(args, kwargs), steps=1)

    assert {row.plan for row in report.failures} == {"tp=2"}
    with pytest.raises(ParityError, match="under tp=2"):
        report.raise_on_failure()


def test_what_a_model_can_not_do_is_said():
    module, args, kwargs = ZOO["resnet"]()
    report = verify(module, example=(args, kwargs), steps=1)

    assert report.passed, str(report)
    assert {row.plan for row in report.rows} == {"dp=2", "tp=2", "zero3=2"}
    assert any(note.startswith("pp=2 was not tried: the batch can't be cut") for note in report.notes)


def test_one_rank_is_not_searched_for():
    module, args, kwargs = ZOO["mlp"]()

    with pytest.raises(InputError, match="ranks=2"):
        verify(module, "auto", example=(args, kwargs))


@pytest.mark.parametrize("plan", ["tp=2", "dp=2,tp=2"])
def test_a_gpt_with_a_tied_embedding(plan):
    report = check("gpt", plan, entries=("train", "eval"))

    assert report.passed, str(report)
    assert "eval output" in {row.kind for row in report.rows}


def test_buffers_are_compared():
    report = check("resnet", "dp=2", steps=2)

    assert report.passed, str(report)
    assert "layer1.bn1.running_mean" in {row.name for row in report.rows if row.kind == "buffer"}


def test_float32_has_a_wider_limit():
    report = check("mlp", "tp=2", dtype=torch.float32)

    assert report.passed, str(report)
    assert report.tolerance == 1e-5


@pytest.mark.parametrize(("precision", "plan"), [("bf16", "zero1=2"), ("bf16-mixed", "dp=2"), ("fp16-mixed", "tp=2")])
def test_a_precision_rounds_alike_on_both_sides(precision, plan):
    module, args, kwargs = ZOO["gpt"](dtype=torch.float32)
    report = verify(module, plan, example=(args, kwargs), precision=precision, entries=("train", "eval"))

    assert report.passed, str(report)
    assert report.tolerance == 2 * torch.finfo(torch.float16 if "fp16" in precision else torch.bfloat16).eps
    assert precision in report.title
    assert not verify(module, plan, example=(args, kwargs), precision=precision, tolerance=1e-6).passed


@pytest.mark.parametrize("plan", ["dp=2", "zero2=2", "tp=2", "pp=2"])
def test_masters_of_both_sides_are_the_same_to_the_last_bit(plan):
    """Steps so small that they show in float32 masters only."""
    report = verify(
        Exact(), plan, example=(SIGNS,), precision="bf16", tolerance=1e-12,
        pipeline={"microbatches": 2 if "pp" in plan else None},
        optimizer=lambda ps: torch.optim.SGD(ps, lr=RATE),
    )  # fmt: skip

    assert report.passed, str(report)
    assert any(row.kind == "parameter" for row in report.rows)


def test_a_plan_for_a_precision_is_verified_in_it():
    module, args, kwargs = ZOO["mlp"](dtype=torch.float32)
    plan = make_plan(module, example=(args, kwargs), plan="tp=2", precision="bf16-mixed")

    assert verify(module, plan, example=(args, kwargs), precision="bf16-mixed").passed


def test_adamw_and_own_optimizers():
    assert check("mlp", "dp=2", optimizer="adamw").passed
    assert check("mlp", "dp=2", optimizer=lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9)).passed


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_dropout_is_exact(plan):
    report = check("dropout_gpt", plan)

    assert report.passed, str(report)


def test_dropout_would_differ_if_its_masks_were_not_the_same(monkeypatch):
    from shardwright.verify import original

    monkeypatch.setattr(original, "dropouts", lambda graph: [])
    torch.manual_seed(0)
    assert not check("dropout_gpt", "dp=2", steps=1).passed


def test_dropout_in_checkpointed_regions():
    from tests.models.zoo import transformer_case

    torch.manual_seed(0)
    module, args, kwargs = transformer_case(4, dropout=0.1, checkpoint=True)
    report = verify(module, "dp=2", example=(args, kwargs), steps=1)

    assert report.passed, str(report)
    assert "capture" in {row.kind for row in report.rows}
    assert "checkpointed" in report.notes[0]


@pytest.mark.parametrize("name", ["hf_llama"])
def test_models_that_cast_to_float32_are_promoted(name):
    report = check(name, "tp=2")

    assert report.passed, str(report)
    assert report.tolerance == 1e-10
    assert "capture" in {row.kind for row in report.rows}


def test_the_model_is_not_changed():
    module, args, kwargs = ZOO["mlp"]()
    before = copy.deepcopy(module.state_dict())

    verify(module, "tp=2", example=(args, kwargs))

    assert all(torch.equal(module.state_dict()[key], value) for key, value in before.items())
    assert all(parameter.grad is None for parameter in module.parameters())


# Wrong programs.


def test_a_gradient_that_is_not_summed_is_named(monkeypatch):
    monkeypatch.setattr(linears, "_apply", lambda x, way, weights, biases: linears._each(x, weights, biases))
    report = check("gpt", "tp=2", steps=1)

    assert not report.passed
    assert report.worst.kind == "gradient"
    assert "blocks.0.ln1.weight" in {row.name for row in report.failures}
    assert "lnf" not in report.worst.name
    assert not any(row.kind == "output" for row in report.failures)  # forward is right
    with pytest.raises(ParityError, match=r"gradient blocks\.0"):
        report.raise_on_failure()


def test_a_sum_that_is_forgotten_shows_in_the_output(monkeypatch):
    monkeypatch.setattr(comm, "all_reduce_", lambda x, group: x)

    assert "output" in {row.kind for row in check("mlp", "tp=2", steps=1).failures}


def test_an_update_of_a_buffer_that_is_lost_shows(monkeypatch):
    from shardwright.runtime.model.parallel_model import ParallelModel

    monkeypatch.setattr(ParallelModel, "_write_updates", lambda self, stage, holding: stage.updates.clear())

    assert {row.kind for row in check("resnet", "dp=2", steps=1).failures} == {"buffer"}


def test_a_step_that_is_not_taken_shows_in_the_parameters():
    class Lazy(torch.optim.SGD):
        elementwise = True

        def step(self, closure=None):
            if not isinstance(self.param_groups[0]["params"][0], nn.Parameter) or hasattr(
                self.param_groups[0]["params"][0], "spec"
            ):
                return None
            return super().step(closure)

    report = check("mlp", "dp=2", steps=1, optimizer=lambda ps: Lazy(ps, lr=0.1))
    assert {row.kind for row in report.failures} == {"parameter"}


# Plans that are objects or files.


def test_a_plan_object_and_a_plan_file_made_for_float32_are_verified_in_float64(tmp_path):
    module, args, kwargs = ZOO["hf_llama"]()
    plan = make_plan(module, example=(args, kwargs), plan="tp=2")
    plan.save(tmp_path / "plan.json")

    assert verify(module, plan, example=(args, kwargs), steps=1).passed
    assert verify(module, tmp_path / "plan.json", example=(args, kwargs), steps=1).passed


def test_a_plan_of_another_model_is_refused():
    module, args, kwargs = ZOO["mlp"]()
    other, other_args, other_kwargs = ZOO["repeated"]()
    plan = make_plan(other, example=(other_args, other_kwargs), plan="tp=2")

    with pytest.raises(PlanError, match="another graph"):
        verify(module, plan, example=(args, kwargs))


# Bad input.


def test_what_makes_no_sense_is_refused():
    module, args, kwargs = ZOO["mlp"]()
    with pytest.raises(InputError, match="entries"):
        verify(module, "tp=2", example=(args, kwargs), entries=("test",))
    with pytest.raises(InputError, match="steps=0"):
        verify(module, "tp=2", example=(args, kwargs), steps=0)
    with pytest.raises(InputError, match="adam'"):
        verify(module, "tp=2", example=(args, kwargs), optimizer="adam")
    with pytest.raises(InputError, match="meta"):
        verify(copy.deepcopy(module).to("meta"), "tp=2", example=(args, kwargs))
    with pytest.raises(InputError, match="ranks=2"):
        verify(module, lambda graph, cluster: None, example=(args, kwargs))


def test_an_error_on_a_rank_comes_out():
    module, args, kwargs = ZOO["mlp"](batch=3)
    with pytest.raises(PlanError, match="batch of 3 does not divide"):
        verify(module, "dp=2", example=(args, kwargs))


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        return (self.up(x) + torch.randn_like(x)).square().mean()


class Jittered(Noisy):
    """Draws in other ways, twice, and in place."""

    def forward(self, x):
        x = self.up(x) * torch.empty_like(x).uniform_(0.9, 1.1)
        kept = torch.bernoulli(torch.full((8,), 0.5, dtype=x.dtype))
        return (x[torch.randperm(4)] * kept + torch.randn(8, dtype=x.dtype)).square().mean()


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
@pytest.mark.parametrize("net", [Noisy, Jittered])
def test_random_numbers_that_are_not_dropout_are_drawn_by_the_same_keys(net, plan):
    report = verify(net(), plan, example=(torch.randn(4, 8),))
    assert report.passed, str(report)


def test_random_numbers_that_have_no_key_are_refused():
    class Odd(Noisy):
        def forward(self, x):
            return (self.up(x) + torch.empty_like(x).cauchy_()).square().mean()

    with pytest.raises(InputError, match="draws random numbers"):
        verify(Odd(), "tp=2", example=(torch.randn(4, 8),))


class Plain(nn.Module):
    """Returns no loss, but outputs by name."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 4)

    def forward(self, x):
        hidden = self.up(x).relu()
        return {"hidden": hidden, "logits": self.down(hidden)}


def test_a_model_without_a_loss_is_compared_by_its_outputs():
    torch.manual_seed(0)
    report = verify(Plain(), "tp=2", example=(torch.randn(4, 8),))

    assert report.passed, str(report)
    assert {row.name for row in report.rows if row.kind == "output"} == {"hidden", "logits"}


def test_a_weight_that_is_iterated_on_without_gradients_is_the_same():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.utils.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 8))
    report = verify(model, "tp=2", example=(torch.randn(4, 8),), entries=("train", "eval"))
    assert report, report


class Batch:
    def __init__(self, x):
        self.x = x


class Unpacks(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, batch):
        y = self.linear(batch.x)
        return y.square().mean(), y.argmax(), y.sum().item()


def test_tensors_in_an_object_and_numbers_among_the_outputs_are_compared():
    report = verify(Unpacks(), "dp=2", example=(Batch(torch.randn(4, 8)),))
    assert report, report
    assert {row.name for row in report.rows if row.kind == "output"} == {"0", "1", "2"}
