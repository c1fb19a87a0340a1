"""Names that the user's class and the compiled model both have: the user's counts, or the model is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.errors import InputError
from shardwright.parallelize import parallelize
from tests.options import grouped
from tests.parity.threaded import world_of
from tests.runtime.ranks import run_ranks

X = torch.linspace(-1, 1, 16, dtype=torch.double).view(4, 4)
PLANS = ["single", "dp=2", "tp=2", "zero3=2", "pp=2"]


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.second(self.first(x).tanh()).square().mean()


def seeded(kind):
    torch.manual_seed(0)
    return kind().double()


def compile_single(model, folder, **options):
    return parallelize(model, plan="single", **grouped(directory=folder, **options))


def check_alike(kind, plan, folder, loop, **options):
    """A loop says the same of the original and of the compiled model on every rank."""
    wanted = loop(seeded(kind))
    models = [seeded(kind) for _ in range(world_of(plan))]

    def run(rank):
        return loop(parallelize(models[rank], plan=plan, **grouped(directory=folder, **options)))

    for seen in run_ranks(world_of(plan), run):
        torch.testing.assert_close(seen, wanted, rtol=1e-10, atol=1e-10)


# -- names of the compiled model -------------------------------------------------------------------


def public_names(folder):
    compiled = compile_single(seeded(Plain), folder)
    return sorted(name for name in {*dir(compiled)} - {*dir(seeded(Plain))} if not name.startswith("_"))


def test_a_method_that_would_be_hidden_is_refused(tmp_path):
    names = public_names(tmp_path)
    assert {"plan", "prepare", "total", "counted", "no_sync", "flops", "call_inputs"} <= set(names)
    for name in names:
        kind = type("Net", (Plain,), {name: lambda self: 3})
        with pytest.raises(InputError, match=rf"Net\.{name} would be hidden by model\.{name}.*another name.*submodule"):
            compile_single(seeded(kind), tmp_path)


@pytest.mark.parametrize("value", [7, nn.Linear(2, 2), nn.Parameter(torch.ones(2))])
def test_so_is_an_attribute_or_a_part(value, tmp_path):
    model = seeded(Plain)
    model.total = value
    with pytest.raises(InputError, match=r"Plain\.total would be hidden"):
        compile_single(model, tmp_path)


def test_so_is_one_of_a_part_that_is_compiled_alone(tmp_path):
    model = nn.Sequential(seeded(Plain))
    model[0].total = 7
    with pytest.raises(InputError, match=r"Plain\.total would be hidden"):
        compile_single(model, tmp_path, parts=["0"])


def test_a_method_that_a_library_adds_to_all_modules_is_not_hidden(tmp_path, monkeypatch):
    monkeypatch.setattr(nn.Module, "smart_apply", lambda self: 3, raising=False)
    assert compile_single(seeded(Plain), tmp_path).smart_apply() == 3


def test_a_submodule_may_have_the_name(tmp_path):
    class Inner(Plain):
        def plan(self):
            return 2.0

        def forward(self, x):
            return super().forward(x) * self.plan()

    check_alike(lambda: nn.Sequential(Inner()), "single", tmp_path, lambda model: model(X).detach())


# -- methods of nn.Module ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["parameters", "named_parameters", "buffers", "modules", "named_modules", "children"])
def test_a_model_that_hides_its_parts_is_refused(name, tmp_path):
    kind = type("Net", (Plain,), {name: lambda self, *args, **kwargs: iter(())})
    with pytest.raises(InputError, match=rf"overrides {name}\(\).*another name, such as trainable_"):
        compile_single(seeded(kind), tmp_path)


class SetsNoise(Plain):
    """`train` sets an attribute that forward reads."""

    noise = 1.0

    def train(self, mode=True):
        self.noise = 2.0 if mode else 3.0
        return super().train(mode)

    def forward(self, x):
        return super().forward(x) * self.noise


class StaysInTraining(Plain):
    """Monte Carlo dropout: `eval` leaves the dropout on."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)

    def eval(self):
        super().eval()
        self.drop.train()
        return self

    def forward(self, x):
        return super().forward(x) * (2.0 if self.drop.training else 1.0)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("example", [None, (X,)], ids=["compiled later", "compiled at once"])
@pytest.mark.parametrize("kind", [SetsNoise, StaysInTraining])
def test_train_and_eval_of_the_user_s_class_count(kind, example, plan, tmp_path):
    def loop(model):
        seen = [model(X).detach()]
        seen += [model.eval()(X).detach(), torch.tensor([part.training for part in model.modules()])]
        seen += [model.train()(X).detach(), torch.tensor([part.training for part in model.modules()])]
        return seen

    check_alike(kind, plan, tmp_path, loop, example=example)


class FirstOnly(Plain):
    """Methods that speak of the first layer only."""

    def zero_grad(self, set_to_none=True):
        self.first.zero_grad(set_to_none)

    def requires_grad_(self, requires_grad=True):
        self.first.requires_grad_(requires_grad)
        return self


@pytest.mark.parametrize("plan", ["single", "dp=2", "tp=2", "zero3=2"])
def test_zero_grad_of_the_user_s_class_counts(plan, tmp_path):
    def loop(model):
        model(X).backward()
        model.zero_grad()
        return [torch.tensor(parameter.grad is None) for parameter in model.parameters()]

    check_alike(FirstOnly, plan, tmp_path, loop, example=(X,))


@pytest.mark.parametrize("plan", ["single", "dp=2", "tp=2", "zero3=2"])
def test_requires_grad_of_the_user_s_class_counts(plan, tmp_path):
    def loop(model):
        assert model.requires_grad_(False) is model
        model(X).backward()
        return [torch.tensor([parameter.requires_grad, parameter.grad is None]) for parameter in model.parameters()]

    check_alike(FirstOnly, plan, tmp_path, loop, example=(X,))


# -- state dicts ------------------------------------------------------------------------------------


class OnlySecond(Plain):
    def state_dict(self, *args, **kwargs):
        return {key: value for key, value in super().state_dict(*args, **kwargs).items() if "second" in key}


class Doubled(Plain):
    def load_state_dict(self, values):
        return super().load_state_dict({key: 2 * value for key, value in values.items()})


class Extra(Plain):
    def get_extra_state(self):
        return {"epoch": 3}

    def set_extra_state(self, state):
        self.state = state


def hooked(register):
    def make():
        model = Plain()
        getattr(model.first, register)(lambda *args: None)
        return model

    return make


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (OnlySecond, "state_dict"),
        (Extra, "get_extra_state"),
        (hooked("register_state_dict_post_hook"), "_state_dict_hooks"),
        (hooked("register_state_dict_pre_hook"), "_state_dict_pre_hooks"),
    ],
)
def test_a_state_dict_of_the_user_s_is_not_passed_over(kind, message, tmp_path):
    model = compile_single(seeded(kind), tmp_path, example=(X,))
    with pytest.raises(InputError, match=f"has {message} of its own.*sw.save.*full_state_dict"):
        model.state_dict()
    assert set(model.full_state_dict()) == set(seeded(Plain).state_dict())


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Doubled, "load_state_dict"),
        (Extra, "set_extra_state"),
        (hooked("register_load_state_dict_pre_hook"), "_load_state_dict_pre_hooks"),
        (hooked("register_load_state_dict_post_hook"), "_load_state_dict_post_hooks"),
    ],
)
def test_nor_is_a_loading_of_the_user_s(kind, message, tmp_path):
    model = compile_single(seeded(kind), tmp_path, example=(X,))
    with pytest.raises(InputError, match=f"has {message} of its own.*before sw.parallelize"):
        model.load_state_dict(seeded(Plain).state_dict())


def test_before_the_model_is_compiled_both_are_the_user_s(tmp_path):
    assert set(compile_single(seeded(OnlySecond), tmp_path).state_dict()) == {"second.weight", "second.bias"}
    model, values = compile_single(seeded(Doubled), tmp_path), seeded(Plain).state_dict()
    model.load_state_dict(values)
    torch.testing.assert_close(dict(model.state_dict()), {key: 2 * value for key, value in values.items()})


def test_a_checkpoint_saves_all_of_a_model_with_a_state_dict_of_its_own(tmp_path):
    model = compile_single(seeded(OnlySecond), tmp_path / "generated", example=(X,))
    sw.save(tmp_path / "saved", model)
    other = compile_single(seeded(OnlySecond), tmp_path / "generated", example=(X,))
    with torch.no_grad():
        other.first.weight.zero_()
    sw.load(tmp_path / "saved", other)
    torch.testing.assert_close(other.full_state_dict(), seeded(Plain).state_dict())


def test_a_checkpoint_does_not_lose_an_extra_state(tmp_path):
    model = compile_single(seeded(Extra), tmp_path / "generated", example=(X,))
    with pytest.raises(InputError, match="get_extra_state is not saved; save it with extra="):
        sw.save(tmp_path / "saved", model)


def test_the_original_class_stays_as_it_was(tmp_path):
    model = seeded(SetsNoise)
    compile_single(copy.deepcopy(model), tmp_path, example=(X,)).eval()
    assert model.training
