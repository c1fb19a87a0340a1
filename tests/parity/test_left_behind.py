"""Optimizers and originals that a compiled model leaves behind: their use is refused, or right."""

from __future__ import annotations

import copy
import warnings
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwright.errors import InputError
from shardwright.parallelize import parallelize
from tests.options import grouped
from tests.parity.threaded import world_of
from tests.runtime.ranks import run_ranks

X = torch.linspace(-1, 1, 16, dtype=torch.double).view(4, 4)


class Two(nn.Module):
    """Two halves that are trained by an optimizer each, as in a GAN."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.second(self.first(x).tanh()).square().mean()


with torch.random.fork_rng():
    torch.manual_seed(0)
    FRESH = Two().double()


def two() -> Two:
    return copy.deepcopy(FRESH)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.5)


def on_one(model, optimizers=None, folder=None, **options):
    return parallelize(model, optimizers, plan="single", **grouped(directory=folder, **{"example": (X,), **options}))


# -- an optimizer that is passed ------------------------------------------------------------------


@pytest.mark.parametrize("other", [lambda model: sgd(two()), lambda model: sgd(copy.deepcopy(model))])
def test_an_optimizer_of_another_model_is_refused(tmp_path, other):
    model = two()
    with pytest.raises(InputError, match="SGD has no parameter of the model, so that it would train nothing"):
        on_one(model, other(model), tmp_path)


def test_an_optimizer_that_was_passed_before_is_refused(tmp_path):
    model = two()
    _, optimizer = on_one(model, sgd(model), tmp_path)
    with pytest.raises(InputError, match="it was passed to parallelize before"):
        on_one(two(), optimizer, tmp_path)


def test_what_no_optimizer_trains_is_said(tmp_path):
    model = two()
    with pytest.warns(UserWarning, match=r"trains second\.weight, second\.bias\..*\[first, second\]"):
        on_one(model, sgd(model.first), tmp_path)


def test_what_is_frozen_on_purpose_needs_no_word(tmp_path):
    model = two()
    model.second.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on_one(model, sgd(model.first), tmp_path)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero1=2", "zero3=2"])
def test_two_optimizers_each_train_their_half(tmp_path, plan):
    def train(model, first, second):
        for optimizer in (first, second, first):
            model(X).backward()
            optimizer.step()
            first.zero_grad()
            second.zero_grad()

    wanted = two()
    train(wanted, sgd(wanted.first), sgd(wanted.second))

    def run(rank):
        model = two()
        built, optimizers = parallelize(
            model, [sgd(model.first), sgd(model.second)], plan=plan, example=(X,), compile={"directory": tmp_path}
        )
        train(built, *optimizers)
        return built.full_state_dict()

    for values in run_ranks(world_of(plan), run):
        for key, value in wanted.state_dict().items():
            torch.testing.assert_close(values[key], value, rtol=0, atol=1e-10)


def test_a_parameter_that_is_listed_twice_is_updated_as_often_as_on_one_device(tmp_path):
    def train(make):
        model = two()
        weight = model.first.weight
        with pytest.warns(UserWarning, match="duplicate parameters"):
            optimizer = torch.optim.SGD([weight, weight, *list(model.parameters())[1:]], lr=0.5)
        built, optimizer = make(model, optimizer)
        built(X).backward()
        optimizer.step()
        return built.state_dict()

    wanted = train(lambda model, optimizer: (model, optimizer))
    for key, value in train(lambda model, optimizer: on_one(model, optimizer, tmp_path)).items():
        torch.testing.assert_close(value, wanted[key], rtol=0, atol=1e-10)


class Around(torch.optim.Optimizer):
    """As accelerate has it: an optimizer that has another one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: Around(sgd(model)), r"Around is around a SGD; pass that"),
        (lambda model: torch.optim.lr_scheduler.StepLR(sgd(model), 1), r"StepLR is around a SGD"),
        (lambda model: "sgd", "the optimizer is a str"),
        (lambda model: [sgd(model), 3], "the optimizer is a int"),
    ],
)
def test_what_is_no_optimizer_is_refused(tmp_path, make, message):
    model = two()
    with pytest.raises(InputError, match=message):
        on_one(model, make(model), tmp_path)


def test_parameters_outside_of_the_model_are_refused_where_rows_differ(tmp_path):
    def run(rank):
        model, beside = two(), nn.Linear(2, 2)
        optimizer = torch.optim.SGD([*model.parameters(), *beside.parameters()], lr=0.1)
        parallelize(model, optimizer, plan="dp=2", inputs="per_replica", compile={"directory": tmp_path})

    with pytest.raises(InputError, match=r"2 parameters that are not the model's \(shapes \[\(2, 2\), \(2,\)\]\)"):
        run_ranks(2, run)


# -- an optimizer that is not passed --------------------------------------------------------------


@pytest.mark.parametrize("example", [None, (X,)])
def test_a_second_optimizer_that_was_not_passed_does_not_train_in_vain(tmp_path, example):
    model = two()
    second = sgd(model.second)
    with pytest.warns(UserWarning, match=r"pass all of them"):
        built, first = on_one(model, sgd(model.first), tmp_path, example=example)
    built(X).backward()
    first.step()
    with pytest.raises(InputError, match=r"second\.weight .* is not trained any more.*\[first, second\]"):
        second.step()
    with pytest.raises(InputError, match="is not trained any more"):
        second.zero_grad()


def test_an_optimizer_can_t_be_made_of_what_is_left_behind(tmp_path):
    model = two()
    on_one(model, None, tmp_path)
    with pytest.raises(InputError, match="is not trained any more"):
        sgd(model)


def test_an_optimizer_of_a_model_that_is_not_compiled_yet_does_not_train_in_vain(tmp_path):
    compiled = on_one(two(), None, tmp_path, example=None)
    optimizer = sgd(compiled)
    compiled(X).backward()
    with pytest.raises(InputError, match=r"is not trained any more.*example="):
        optimizer.step()


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero3=2"])
def test_an_optimizer_made_of_the_compiled_parameters_trains_them(tmp_path, plan):
    wanted = two()
    wanted(X).backward()
    sgd(wanted).step()

    def run(rank):
        compiled = parallelize(two(), plan=plan, example=(X,), compile={"directory": tmp_path})
        optimizer = sgd(compiled)
        compiled(X).backward()
        optimizer.step()
        return compiled.full_state_dict()

    for values in run_ranks(2, run):
        for key, value in wanted.state_dict().items():
            torch.testing.assert_close(values[key], value, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("plan", "kind", "message"),
    [
        ("zero1=2", torch.optim.SGD, "through a share or a master"),
        ("zero2=2", torch.optim.SGD, "through a share or a master"),
        ("tp=2", torch.optim.Adafactor, "more than the same element"),
        ("zero3=2", torch.optim.LBFGS, "more than the same element"),
    ],
)
def test_where_it_would_be_wrong_it_has_to_be_passed(tmp_path, plan, kind, message):
    def run(rank):
        compiled = parallelize(two(), plan=plan, example=(X,), compile={"directory": tmp_path})
        optimizer = kind(compiled.parameters(), lr=0.1)
        compiled(X).backward()
        optimizer.step(lambda: compiled(X))

    with pytest.raises(InputError, match=f"did not have when it was passed to sw.parallelize: .*{message}"):
        run_ranks(2, run)


def test_a_group_that_is_added_later_has_to_be_there_before_where_it_would_be_wrong(tmp_path):
    def run(rank):
        model = two()
        model.second.requires_grad_(False)
        built, optimizer = parallelize(
            model, sgd(model.first), plan="zero1=2", example=(X,), compile={"directory": tmp_path}
        )
        built(X).backward()
        optimizer.step()
        optimizer.add_param_group({"params": [built.first.weight]})
        optimizer.step()

    with pytest.raises(InputError, match=r"first\.weight is updated through a share.*with all param groups"):
        run_ranks(2, run)


def test_a_step_of_elements_still_runs_without_interceptions(tmp_path, monkeypatch):
    """Our look at all optimizers is no reason to take the slow way, another hook is."""
    fast: list[bool] = []

    @contextmanager
    def fused(optimizer):
        fast.append(True)
        yield

    monkeypatch.setattr("shardwright.runtime.optimizer.adopt.fused", fused)
    model = two()
    built, optimizer = on_one(model, sgd(model), tmp_path)
    built(X).backward()
    optimizer.step()
    hook = register_optimizer_step_pre_hook(lambda *_: None)
    optimizer.step()
    hook.remove()
    assert fast == [True]


# -- the original -----------------------------------------------------------------------------------


def trained(model, folder):
    built, optimizer = on_one(model, sgd(model), folder)
    built(X).backward()
    optimizer.step()
    return built


USES = {
    "a call": lambda model: model(X),
    "its state dict": lambda model: model.state_dict(),
    "a copy": copy.deepcopy,
    "a second parallelize": lambda model: parallelize(model, plan="single", example=(X,)),
}


@pytest.mark.parametrize("use", USES)
def test_the_original_says_that_it_is_stale(tmp_path, use):
    model = two()
    trained_model = trained(model, tmp_path)
    with pytest.raises(InputError, match=r"(?s)first\.weight .*values of before.*full_state_dict"):
        USES[use](model)
    del trained_model
    with pytest.raises(InputError, match=r"(?s)first\.weight .*values of before"):
        USES[use](model)


def test_the_original_is_right_as_long_as_nothing_was_trained(tmp_path):
    model = two()
    compiled = on_one(model, sgd(model), tmp_path)[0]
    torch.testing.assert_close(model(X), compiled(X))
    assert all(torch.equal(value, FRESH.state_dict()[key]) for key, value in model.state_dict().items())
    torch.testing.assert_close(copy.deepcopy(model)(X), compiled(X))
    torch.testing.assert_close(on_one(model, None, tmp_path)(X), compiled(X))
    assert sum(parameter.numel() for parameter in model.parameters()) == 76


class Own(nn.Parameter):
    """A parameter that a library has a name of its own for."""


def test_parameters_of_a_class_of_their_own_are_left_behind_too(tmp_path):
    model = two()
    model.first.weight = Own(model.first.weight.detach())
    trained_model = trained(model, tmp_path)
    with pytest.raises(InputError, match=r"first\.weight .*values of before"):
        model(X)
    assert trained_model is not None


def test_in_a_pipeline_the_original_is_right_until_something_is_trained(tmp_path):
    """Also where another rank has the shard."""

    def run(rank):
        model = two()
        compiled = parallelize(
            model, plan="pp=2", example=(X,), pipeline={"microbatches": 1}, compile={"directory": tmp_path}
        )
        torch.testing.assert_close(model(X), two()(X))
        with torch.no_grad():
            next(compiled.parameters()).zero_()
        with pytest.raises(InputError, match="values of before"):
            model(X)

    run_ranks(2, run)


@pytest.mark.parametrize(
    "train",
    [
        lambda model: clip_grad_norm_(model.parameters(), 1.0),
        lambda model: model.zero_grad(),
        lambda model: model.requires_grad_(False),
        lambda model: model.first.weight.data.zero_(),
        lambda model: nn.init.zeros_(model.first.weight),
    ],
)
def test_training_the_original_is_refused(tmp_path, train):
    model = two()
    trained_model = trained(model, tmp_path)
    with pytest.raises(InputError, match="first"):
        train(model)
    assert trained_model is not None
