"""Methods other than `forward` do on the compiled model what they do on the original, or are refused by name."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from shardwright.errors import CaptureError, InputError
from shardwright.parallelize import parallelize
from tests.models.methods import Coder, Talker
from tests.options import grouped
from tests.runtime.ranks import run_ranks

from .looped import gradients, parameters
from .threaded import world_of

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
WORDS = torch.randint(16, (2, 5), generator=torch.Generator().manual_seed(0))


def seeded(make):
    torch.manual_seed(0)
    return make().double()


def both(make, plan, folder, loop, **options):
    """What a loop says of the original and of the compiled model on every rank."""
    wanted = loop(seeded(make))
    models = [seeded(make) for _ in range(world_of(plan))]

    def run(rank):
        return loop(parallelize(models[rank], plan=plan, **grouped(directory=folder, **options)))

    for seen in run_ranks(world_of(plan), run):
        assert len(seen) == len(wanted)
        for mine, other in zip(seen, wanted, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)


class Named(nn.Linear):
    def forward(self, hidden: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        """Scaled."""
        return super().forward(hidden) * scale


def test_forward_has_the_signature_of_the_original(tmp_path):
    """Others decide by it what to pass: transformers' Trainer drops columns of a dataset that it does not name."""
    original = Named(8, 4)
    compiled = parallelize(Named(8, 4), plan="single", compile={"directory": tmp_path})
    assert inspect.signature(compiled.forward) == inspect.signature(original.forward)
    assert list(inspect.signature(compiled.forward).parameters) == ["hidden", "scale"]
    assert compiled.forward.__doc__ == "Scaled."


PLANS = ["dp=2", "tp=2", "zero3=2", "pp=2"]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("first", [False, True], ids=["after forward", "as the first call"])
def test_a_loss_that_calls_submodules_is_trained(plan, first, tmp_path):
    def loop(model):
        if not first:
            model(X).sum().backward()
            model.zero_grad()
        loss = model.loss(X)
        loss.backward()
        return [loss.detach(), *gradients(model)]

    both(Coder, plan, tmp_path, loop)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero3=2"])
def test_halves_of_the_model_are_methods(plan, tmp_path):
    def loop(model):
        model(X)
        z = model.encode(X)
        y = model.decode(z)
        y.square().mean().backward()
        return [z.detach(), y.detach(), *gradients(model)]

    both(Coder, plan, tmp_path, loop)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_a_method_that_calls_the_model_is_python_around_it(plan, tmp_path):
    def loop(model):
        loss = model.loss_of_call(X)
        loss.backward()
        return [loss.detach(), *gradients(model)]

    both(Coder, plan, tmp_path, loop)


def test_every_method_is_a_program_of_its_own(tmp_path):
    model = parallelize(seeded(Coder), plan="single", compile={"directory": tmp_path})
    for _ in range(2):
        model(X), model.encode(X), model.loss(X)
    assert len(set(map(id, model._entries.values()))) == 3


def test_a_method_that_only_reads_buffers_or_nothing_compiles_nothing(tmp_path):
    def loop(model):
        model(X)
        model.set_temperature(2.0)
        return [model.noisy(X), torch.tensor(model.temperature), model(X).detach(), model.init_hidden(3)]

    both(Coder, "tp=2", tmp_path, loop)


@pytest.mark.parametrize("plan", ["tp=2", "zero3=2"])
def test_sizes_of_parameters_are_those_of_the_whole(plan, tmp_path):
    def loop(model):
        early = model.count()
        model(X)
        return [torch.tensor(early), torch.tensor(model.count())]

    both(Coder, plan, tmp_path, loop)


def test_a_hidden_state_made_before_the_first_call_does_not_decide_the_plan(tmp_path):
    model = parallelize(seeded(Coder), plan="single", compile={"directory": tmp_path})
    assert model.init_hidden(2).shape == (2, 8)
    assert model.plan is None


@pytest.mark.parametrize("plan", ["tp=2", "zero3=2"])
def test_an_optimizer_that_a_method_makes_trains_the_shards(plan, tmp_path):
    def loop(model):
        model(X)
        optimizer = model.optimizer()
        for _ in range(2):
            optimizer.zero_grad()
            model.loss(X).backward()
            optimizer.step()
        return parameters(model)

    both(Coder, plan, tmp_path, loop)


@pytest.mark.parametrize("plan", PLANS)
def test_a_loop_that_generates(plan, tmp_path):
    def loop(model):
        model.eval()
        return [model.generate(WORDS, 3)]

    both(Talker, plan, tmp_path, loop)


@pytest.mark.parametrize("name", ["crop", "reset", "remember"])
def test_what_a_program_can_not_do_is_refused_by_name(name, tmp_path):
    model = parallelize(seeded(Coder), plan="single", compile={"directory": tmp_path})
    model(X)
    args = {"crop": (4,), "reset": ()}.get(name, (X,))
    with pytest.raises(CaptureError, match=rf"Coder\.{name} can't be called on a parallelized model"):
        getattr(model, name)(*args)


def test_a_method_may_return_a_number(tmp_path):
    model = parallelize(seeded(Coder), plan="single", compile={"directory": tmp_path})
    assert model.biggest(X) == pytest.approx(seeded(Coder).biggest(X))


def test_submodules_after_a_call_of_the_model_are_refused(tmp_path):
    model = parallelize(seeded(Coder), plan="single", compile={"directory": tmp_path})
    model(X)
    with pytest.raises(InputError, match=r"Coder\.mixed calls encoder after it has called the model"):
        model.mixed(X)


def test_a_submodule_on_its_own_is_refused_still(tmp_path):
    model = parallelize(seeded(Coder), plan="single", compile={"directory": tmp_path})
    model(X)
    with pytest.raises(InputError, match="can't be called on its own"):
        model.encoder(X)


def llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("cache", [False, True], ids=["without a cache", "with a cache"])
def test_generate_of_transformers(cache, tmp_path):
    def loop(model):
        return [model.generate(3 + WORDS, max_new_tokens=2, do_sample=False, use_cache=cache)]

    both(llama, "tp=2", tmp_path, loop)


def test_save_pretrained_is_refused_with_what_to_do_instead(tmp_path):
    model = parallelize(seeded(llama), plan="single", compile={"directory": tmp_path})
    with pytest.raises(InputError, match=r"save_pretrained can't be called.*checkpoint\.save_weights\(path, model\)"):
        model.save_pretrained(tmp_path)


class Measured(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))).square().mean()

    @property
    def width(self):
        return self.first.weight.shape[0] + self.second.weight.size(1)

    @property
    def strength(self):
        return self.first.weight.norm()


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero3=2"])
def test_properties_are_about_whole_parameters(plan, tmp_path):
    def run(rank):
        model = parallelize(Measured(), plan=plan, compile={"directory": tmp_path})
        model(torch.ones(4, 8))
        with pytest.raises(InputError, match=r"property strength of Measured computes with.*make it a method"):
            _ = model.strength
        return model.width

    assert run_ranks(2, run) == [24, 24]


def test_a_property_that_reads_what_another_stage_holds_is_refused(tmp_path):
    def run(rank):
        model = parallelize(Measured(), plan="pp=2", compile={"directory": tmp_path})
        model(torch.ones(4, 8))
        with pytest.raises(InputError, match="weight is a part of another stage of the pipeline"):
            _ = model.width

    run_ranks(2, run)


class Counting(Coder):
    """Keeps things among its attributes; one method changes one of them."""

    def __init__(self):
        super().__init__()
        self.calls, self.seen = 0, []

    def encode_and_count(self, x):
        self.calls += 1
        return self.encoder(x)


def test_a_list_among_the_attributes_does_no_harm(tmp_path):
    both(Counting, "single", tmp_path, lambda model: [model.encode(X)])


def test_a_method_that_counts_its_calls_is_refused(tmp_path):
    model = parallelize(seeded(Counting), plan="single", compile={"directory": tmp_path})
    model(X)
    for _ in range(2):
        with pytest.raises(CaptureError, match=r"encode_and_count sets self\.calls, which a program can't"):
            model.encode_and_count(X)


class Keeping(nn.Module):
    """Leaves something for whoever looks."""

    def __init__(self):
        super().__init__()
        self.encoder, self.last, self.calls = nn.Linear(8, 8), None, 0

    def forward(self, x):
        self.last, self.calls = self.encoder(x), self.calls + 1
        return self.last.square().mean()


@pytest.mark.parametrize("name", ["last", "calls"])
def test_what_forward_leaves_behind_is_not_read_stale(tmp_path, name):
    model = parallelize(seeded(Keeping), plan="single", compile={"directory": tmp_path})
    assert getattr(model, name) in (None, 0)
    model(X)
    with pytest.raises(InputError, match=f"the forward of Keeping sets self.{name}, .*return it from forward"):
        getattr(model, name)


class KeepingInside(nn.Module):
    """A submodule leaves something, which a method of the model reads."""

    def __init__(self):
        super().__init__()
        self.inner = Keeping()

    def forward(self, x):
        return self.inner(x)

    def read(self):
        return self.inner.calls


@pytest.mark.parametrize("read", [lambda model: model.inner.calls, lambda model: model.read()])
def test_nor_what_a_submodule_leaves_behind(tmp_path, read):
    model = parallelize(seeded(KeepingInside), plan="single", compile={"directory": tmp_path})
    model(X)
    with pytest.raises(InputError, match=r"the forward of Keeping sets self.calls, .* model\.inner\.calls .*return it"):
        read(model)
    assert isinstance(model.inner, Keeping)
    model.inner.calls = 0  # setting it does no harm
    model(X)
