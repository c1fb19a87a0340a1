"""Every way in which a loop may ask for gradients: under a plan it gives what one device gives, or is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwright.errors import InputError

from .critics import LABELS, OTHER, Classifier, Critic, X, agree, on_ranks
from .looped import gradients, parameters

PLANS = ("dp=2", "tp=2", "zero1=2", "zero2=2", "zero3=2", "dp=2,tp=2", "zero3=2,tp=2", "pp=2", "dp=2,recompute")
SPLIT = ("tp=2", "zero3=2")


def compiled(model):
    """A model whose parameters are those that a call uses: shards are there after the first."""
    model(X, LABELS)
    return model


# -- torch.autograd.grad ---------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS)
def test_gradients_of_parameters_given_to_the_caller(plan):
    def loop(model, optimizer):
        stored = list(compiled(model).parameters())
        for parameter, gradient in zip(stored, torch.autograd.grad(model(X, LABELS), stored), strict=True):
            assert parameter.grad is None
            parameter.grad = gradient
        seen = gradients(model)
        optimizer.step()
        return seen + parameters(model)

    agree(Classifier, plan, loop)


@pytest.mark.parametrize("plan", [plan for plan in PLANS if "pp" not in plan])
def test_a_penalty_on_the_gradients_of_parameters(plan):
    """As MAML and sharpness penalties have it: gradients of parameters, which have gradients."""

    def loop(model, optimizer):
        stored = list(compiled(model).parameters())
        grads = torch.autograd.grad(model(X, LABELS), stored, create_graph=True)
        sharpness = sum(gradient.square().sum() for gradient in grads)
        sharpness.backward()
        return [sharpness.detach().clone(), *gradients(model)]

    agree(Classifier, plan, loop)


@pytest.mark.parametrize("plan", PLANS)
def test_gradients_of_inputs_leave_parameters_alone(plan):
    def loop(model, optimizer):
        x = X.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x, LABELS), x)
        assert all(parameter.grad is None for parameter in model.parameters())
        return [slope]

    agree(Classifier, plan, loop)


@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("plan", SPLIT)
def test_gradients_of_parameters_that_are_left_behind_are_refused(plan, unused):
    def loop(model, optimizer):
        stored = list(model.parameters())  # of a model that is not compiled yet
        return list(torch.autograd.grad(model(X, LABELS), stored, allow_unused=unused))

    with pytest.raises(InputError, match=r"is not trained any more.*example="):
        on_ranks(Classifier, plan, loop)


def test_a_parameter_of_two_stages_is_refused():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.mid, self.down = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
            self.down.weight = self.up.weight

        def forward(self, x, labels):
            return self.down(torch.tanh(self.mid(torch.tanh(self.up(x))))).square().mean()

    def loop(model, optimizer):
        compiled(model)
        return list(torch.autograd.grad(model(X, LABELS), list(model.parameters())))

    with pytest.raises(InputError, match="several stages"):
        on_ranks(Tied, "pp=2", loop)


# -- backward --------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS)
def test_only_the_parameters_that_are_named_get_a_gradient(plan):
    def loop(model, optimizer):
        named = [parameter for key, parameter in compiled(model).named_parameters() if "weight" in key]
        model(X, LABELS).backward(inputs=named)
        return gradients(model)

    agree(Classifier, plan, loop)


@pytest.mark.parametrize("plan", PLANS)
def test_a_retained_graph_may_be_gone_through_again(plan):
    def loop(model, optimizer):
        loss = model(X, LABELS)
        loss.backward(retain_graph=True)
        loss.backward()
        return gradients(model)

    agree(Classifier, plan, loop)


@pytest.mark.parametrize("plan", [plan for plan in PLANS if "recompute" not in plan])
def test_two_losses_and_outputs_that_are_no_numbers(plan):
    def loop(model, optimizer):
        scores = model(X)
        scores.square().mean().backward(retain_graph=True)
        scores.backward(torch.arange(4.0, dtype=torch.float64).unsqueeze(1))
        return gradients(model)

    agree(Critic, plan, loop)


@pytest.mark.parametrize("plan", PLANS)
def test_calls_without_a_backward(plan):
    def loop(model, optimizer):
        model(OTHER, LABELS)
        loss = model(X, LABELS)
        model(OTHER, LABELS)
        loss.backward()
        optimizer.step()
        return gradients(model) + parameters(model)

    agree(Classifier, plan, loop)


@pytest.mark.parametrize("plan", ["dp=2", "pp=2,dp=2"])
def test_accumulate_counts_backwards_and_not_calls(plan):
    def loop(model, optimizer):
        model(OTHER, LABELS)  # such as a look at the loss
        for _ in range(2):
            model(X, LABELS).backward()
        optimizer.step()
        return parameters(model)

    agree(Classifier, plan, loop, accumulate=2)


@pytest.mark.parametrize("plan", ["dp=2", "zero2=2"])
def test_a_step_with_gradients_that_were_never_summed_is_refused(plan):
    def loop(model, optimizer):
        compiled(model)
        with model.no_sync():
            model(X, LABELS).backward()
        optimizer.step()
        return []

    with pytest.raises(InputError, match="not summed over ranks"):
        on_ranks_only(Classifier, plan, loop)


def test_a_backward_after_a_step_through_a_graph_of_before_is_refused():
    """torch refuses it on one device; ZeRO-3 gathers parameters again, and would take the new ones."""

    def loop(model, optimizer):
        loss = model(X, LABELS)
        loss.backward(retain_graph=True)
        optimizer.step()
        loss.backward()
        return []

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loop(stored := Classifier().double(), torch.optim.SGD(stored.parameters(), lr=0.1))
    with pytest.raises(InputError, match="has changed since the forward"):
        on_ranks_only(Classifier, "zero3=2", loop)


def on_ranks_only(make, plan, loop, **options):
    """Run a loop on ranks; one device has nothing to say to it."""
    started = []

    def unless_first(model, optimizer):
        if not started:
            started.append(True)
            return []
        return loop(model, optimizer)

    return on_ranks(make, plan, unless_first, **options)


# -- parameters that are frozen ----------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS)
def test_parameters_are_frozen_and_thawed_later(plan):
    def loop(model, optimizer):
        compiled(model)
        seen = []
        for needs in (True, False, True):
            for key, parameter in model.named_parameters():
                parameter.requires_grad_(needs or "up" not in key)
            optimizer.zero_grad()
            model(X, LABELS).backward()
            optimizer.step()
            seen += gradients(model)
        return seen + parameters(model)

    agree(Classifier, plan, loop)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero1=2", "zero3=2", "pp=2"])
def test_what_is_frozen_before_the_first_call_is_not_trained_until_it_is_thawed(plan):
    def loop(model, optimizer):
        seen = []
        for needs in (False, True):
            for key, parameter in model.named_parameters():
                parameter.requires_grad_(needs or "down" in key)
            optimizer.zero_grad()
            seen.append(model(X, LABELS))
            seen[-1].backward()
            optimizer.step()
            seen += gradients(model)
        return seen + parameters(model)

    agree(Classifier, plan, loop)


@pytest.mark.parametrize("plan", ["tp=2", "zero3=2"])
def test_what_is_thawed_before_the_first_call_is_trained(plan):
    def loop(model, optimizer):
        model.up.requires_grad_(True)
        model(X, LABELS).backward()
        return gradients(model)

    agree(Frozen, plan, loop)


class Frozen(Classifier):
    def __init__(self):
        super().__init__()
        self.up.requires_grad_(False)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero3=2", "pp=2"])
def test_what_was_frozen_when_it_was_compiled_stays_so(plan):
    def loop(model, optimizer):
        compiled(model).up.requires_grad_(True)
        model(X, LABELS).backward()
        return []

    with pytest.raises(InputError, match=r"were frozen when the model was compiled.*freeze afterwards"):
        on_ranks(Frozen, plan, loop)


# -- evaluation and training -------------------------------------------------------------------


@pytest.mark.parametrize("first", ["training", "evaluation"])
@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero3=2", "pp=2"])
def test_training_goes_on_after_inference_mode(plan, first):
    def loop(model, optimizer):
        seen = []
        for turn in range(3):
            if (turn % 2 == 0) == (first == "training"):
                model.train()
                optimizer.zero_grad()
                model(X, LABELS).backward()
                optimizer.step()
            else:
                model.eval()
                with torch.inference_mode():
                    seen.append(model(X, LABELS).clone())
        return seen + parameters(model)

    agree(Classifier, plan, loop)


# -- optimizers ----------------------------------------------------------------------------------


def lbfgs(parameters):
    return torch.optim.LBFGS(parameters, lr=0.5, max_iter=3)


def solve(model, optimizer):
    def closure():
        optimizer.zero_grad()
        loss = model(X, LABELS)
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.step(closure)
    return parameters(model)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero3=2"])
def test_lbfgs_needs_a_model_that_is_compiled(plan):
    agree(Classifier, plan, solve, lbfgs, example=(X, LABELS))
    with pytest.raises(InputError, match=r"compiled within LBFGS.step.*example="):
        on_ranks(Classifier, plan, solve, lbfgs)


def test_an_elementwise_optimizer_may_compile_it_in_its_closure():
    agree(Classifier, "zero2=2", solve)


# -- sparse gradients ----------------------------------------------------------------------------


class Tables(nn.Module):
    """As DLRM has them: bags of categories beside numbers."""

    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(6, 8, mode="sum", sparse=True)
        self.table = nn.Embedding(6, 8, sparse=True)
        self.head = nn.Linear(8, 1)

    def forward(self, ids):
        return self.head(torch.tanh(self.bag(ids) + self.table(ids[:, 0]))).square().mean()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # Adagrad's, on one device
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero2=2", "zero3=2", "pp=2"])
def test_sparse_tables_train_as_on_one_device(plan, optimizer):
    ids = torch.tensor([[0, 3], [1, 3], [5, 2], [0, 0]])

    def loop(model, updates):
        for _ in range(2):
            updates.zero_grad()
            model(ids).backward()
            updates.step()
        return parameters(model)

    options = {"microbatches": 1} if plan == "pp=2" else {}
    agree(Tables, plan, loop, lambda value: optimizer(value, lr=0.1), **options)


# -- what is done between a forward and its backward -------------------------------------------


class Halves(nn.Module):
    """Returns what it goes on computing with."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 4)

    def forward(self, x):
        h = torch.tanh(self.up(x))
        return self.down(h), h


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero3=2"])
def test_what_is_frozen_between_forward_and_backward_gets_no_gradient(plan):
    def loop(model, optimizer):
        compiled(model)
        loss = model(X, LABELS)
        model.down.weight.requires_grad_(False)
        loss.backward()
        assert model.down.weight.grad is None
        return gradients(model)

    agree(Classifier, plan, loop)


def test_an_input_that_is_written_to_before_backward_is_refused_under_zero3():
    def loop(model, optimizer):
        x = X.clone()
        loss = model(x)[0].sum()
        x.zero_()
        loss.backward()

    def refused(model, optimizer):
        with pytest.raises((InputError, RuntimeError), match=r"in.?place"):
            loop(model, optimizer)
        return [torch.ones(1)]

    on_ranks(Halves, "zero3=2", refused)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero3=2"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_that_is_compiled_inside_of_a_checkpoint(plan, reentrant):
    def loop(model, optimizer):
        x = X.clone().requires_grad_()
        checkpoint(lambda x: model(x)[0], x, use_reentrant=reentrant).square().sum().backward()
        return [x.grad, *gradients(model)]

    agree(Halves, plan, loop)


def hooked(loss, inner):
    inner.register_hook(lambda gradient: 2 * gradient)
    loss.backward()


def retained(loss, inner):
    inner.retain_grad()
    loss.backward()


LOOKS = [hooked, retained, torch.autograd.grad]


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "pp=2"])
def test_the_gradient_of_an_output_that_the_model_goes_on_with_is_refused(plan, look):
    def loop(model, optimizer):
        scores, inner = model(X)
        if isinstance(model, Halves):
            return [torch.ones(1)]
        with pytest.raises(InputError, match=r"the gradient of the output \[1\] is read.*of its use outside"):
            look(scores.square().sum() + inner.sum(), inner)
        return [torch.ones(1)]

    on_ranks(Halves, plan, loop)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "pp=2"])
def test_hooks_on_other_outputs_see_and_change_their_gradient(plan):
    def loop(model, optimizer):
        seen = []
        scores, inner = model(X)
        scores.register_hook(lambda gradient: seen.append(gradient.clone()) or 2 * gradient)
        (scores.square().sum() + inner.sum()).backward()
        return [*seen, *gradients(model)]

    agree(Halves, plan, loop)
