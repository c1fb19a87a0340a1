"""Every class of torch.optim under plans, against one device."""

from __future__ import annotations

import tempfile
from functools import partial

import pytest
import torch
from torch import optim

from shardwright.errors import InputError
from shardwright.parallelize import parallelize
from tests.models.zoo import ZOO
from tests.runtime.ranks import run_ranks

from .looped import both, parameters
from .threaded import world_of

KINDS = {
    "SGD": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD foreach": partial(optim.SGD, lr=0.1, momentum=0.9, dampening=0.1, foreach=True, maximize=True),
    "SGD fused": partial(optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "Adam": partial(optim.Adam, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "Adam fused": partial(optim.Adam, lr=1e-2, fused=True),
    "AdamW": partial(optim.AdamW, lr=1e-2),
    "AdamW foreach": partial(optim.AdamW, lr=1e-2, foreach=True),
    "Adamax": partial(optim.Adamax, lr=1e-2),
    "NAdam": partial(optim.NAdam, lr=1e-2),
    "RAdam": partial(optim.RAdam, lr=1e-2),
    "Adagrad": partial(optim.Adagrad, lr=1e-2, initial_accumulator_value=0.1),
    "Adadelta": partial(optim.Adadelta, lr=1.0),
    "RMSprop": partial(optim.RMSprop, lr=1e-3, centered=True, momentum=0.5),
    "Rprop": partial(optim.Rprop, lr=1e-3),
    "ASGD": partial(optim.ASGD, lr=1e-2, t0=1),
    "Adafactor": partial(optim.Adafactor, lr=1e-2),
    "Muon": partial(optim.Muon, lr=1e-2, ns_steps=2),
}
ODD = {"LBFGS": "needs a closure, tested in tests/runtime", "SparseAdam": "is refused"}
PLANS = ("tp=2", "zero1=2", "zero3=2", "pp=2")


def test_every_class_of_torch_is_here():
    known = {name for name, var in vars(optim).items() if isinstance(var, type) and issubclass(var, optim.Optimizer)}
    assert {name.split()[0] for name in KINDS} | set(ODD) == known - {"Optimizer"}


def groups_of(module, kind):
    """Two groups with settings of their own; Muon takes matrices only."""
    weights = [parameter for parameter in module.parameters() if parameter.dim() == 2]
    rest = [parameter for parameter in module.parameters() if parameter.dim() != 2]
    if kind == "Muon":
        for value in rest:
            value.requires_grad_(False)
        return [{"params": weights[:1], "lr": 3e-2}, {"params": weights[1:]}]
    return [{"params": weights, "lr": 2e-2}, {"params": rest}]


def train(model, optimizer, case):
    for _ in range(3):
        model(*case.args).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [group["lr"] for group in optimizer.param_groups], parameters(model)


@pytest.mark.parametrize("plan", PLANS)
def test_classes(plan):
    size, folder = world_of(plan), tempfile.mkdtemp(prefix="optimizers-")
    cases = {kind: [ZOO["mlp"](dtype=torch.float64) for _ in range(size + 1)] for kind in KINDS}
    wanted = {}
    for kind, (case, *_) in cases.items():
        wanted[kind] = train(case.module, KINDS[kind](groups_of(case.module, kind)), case)

    def rank(number):
        by_name = {}
        for kind, make in KINDS.items():
            case = cases[kind][number + 1]
            model = make(groups_of(case.module, kind))
            by_name[kind] = train(*parallelize(case.module, model, plan=plan, compile={"directory": folder}), case)
        return by_name

    for result in run_ranks(size, rank, timeout=200):
        for kind, (rates, mine) in result.items():
            assert rates == wanted[kind][0]
            for value, other in zip(mine, wanted[kind][1], strict=True):
                assert float((value - other).abs().max()) <= 1e-9 * float(other.abs().max()), kind


@pytest.mark.parametrize(
    ("make", "plan", "words"),
    [
        (partial(optim.SparseAdam, lr=0.1), "single", "SparseAdam"),
        (optim.LBFGS, "pp=2", "LBFGS"),
    ],
)
def test_what_can_not_be_right_is_refused(make, plan, words):
    cases, folder = [ZOO["mlp"]() for _ in range(2)], tempfile.mkdtemp(prefix="refused-")

    def rank(number):
        case = cases[number]
        with pytest.raises(InputError, match=words):
            parallelize(
                case.module, make(case.module.parameters()), plan=plan, example=case.args, compile={"directory": folder}
            )

    run_ranks(world_of(plan), rank)


@pytest.mark.parametrize("plan", ["tp=2", "zero2=2"])
def test_rprop_with_a_closure_fills_by_masks_of_shards(plan):
    def loop(model, optimizer, case):
        def closure():
            optimizer.zero_grad()
            loss = model(*case.args)
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        return list(parameters(model))

    both("mlp", plan, loop, partial(optim.Rprop, lr=1e-2), example=True)
