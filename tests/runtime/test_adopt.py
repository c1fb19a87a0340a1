"""The optimizer stays the same object, and does to shards what it would do to the whole."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from shardwright.layout import REPLICATE, Axis, Mesh, contiguous_shard, make_layout
from shardwright.runtime.optimizer import adopt as optimizer_module
from shardwright.runtime.optimizer.adopt import adopt, parameters_seen_by
from shardwright.runtime.parameters.full_tensors import coordinates, gather_tensor, shard_tensor
from shardwright.runtime.parameters.gradient_sync import GradientSync
from shardwright.runtime.parameters.sharded import make_parameter, set_raw_gradient
from shardwright.runtime.world import Groups
from shardwright.storage import ParameterSpec, parse_storage, wanted_groups
from tests.runtime.little import Shards, Single, assert_same, batch, mesh_of
from tests.runtime.ranks import run_processes, run_ranks
from tests.runtime.test_zero3 import Split

MAKERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adamw foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01),
}
BEFORE = 2


def schedule(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def train(model, optimizer, scheduler, steps, loss=None):
    for step in steps:
        (loss or model)(*batch(step)).backward()
        clip_grad_norm_(model.parameters(), 0.7)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def params_of(model):
    """Two groups, to see that shards keep their places."""
    named = dict(model.named_parameters())
    return [
        {"params": [p for n, p in named.items() if n.startswith("w")], "weight_decay": 0.1},
        {"params": [p for n, p in named.items() if not n.startswith("w")]},
    ]


def build(dp, tp, level):
    if level == 3:
        return Split(mesh_of(dp, tp))
    model = Shards(mesh_of(dp, tp), level)
    GradientSync(model.pairs, model.groups, bucket_mb=1e-4, first_mb=1e-5)
    return model


def taken_over(maker, dp, tp, level):
    """Two steps on a single device, then taken over by shards, with the state, and three steps more."""
    single = Single()
    optimizer = MAKERS[maker](params_of(single))
    scheduler = schedule(optimizer)
    train(single, optimizer, scheduler, range(BEFORE))

    model = build(dp, tp, level)
    named = dict(single.named_parameters())
    with torch.no_grad():
        at = coordinates(model.groups)
        for pair, parameter in model.pairs:
            parameter.data.copy_(shard_tensor(named[pair.name], pair, model.groups.mesh.sizes, at))
    adopt(optimizer, {named[name]: model.p[name] for name in named})
    train(model, optimizer, scheduler, range(BEFORE, BEFORE + 3), model.loss)
    return {name: model.whole(p) for name, p in model.p.items()}, optimizer.param_groups[0]["lr"]


def single_result(maker):
    single = Single()
    optimizer = MAKERS[maker](params_of(single))
    scheduler = schedule(optimizer)
    train(single, optimizer, scheduler, range(BEFORE + 3))
    return {n: p.detach() for n, p in single.named_parameters()}, optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("maker", MAKERS)
def test_taken_over_in_the_middle_of_training(maker, dp, tp, level):
    """State moves along, the scheduler goes on, clipping takes effect, all ZeRO levels agree."""
    want, rate = single_result(maker)
    for got, lr in run_ranks(dp * tp, lambda rank: taken_over(maker, dp, tp, level)):
        assert lr == rate
        assert_same(got, want, atol=1e-11)


def test_the_optimizer_keeps_only_its_share_of_the_state():
    def body(rank, level):
        model = build(2, 1, level)
        optimizer = torch.optim.Adam(model.parameters())
        adopt(optimizer, {p: p for p in model.parameters()})
        model.loss(*batch()).backward()
        optimizer.step()
        return sum(state["exp_avg"].numel() for state in optimizer.state.values())

    whole = run_ranks(2, body, 0)[0]
    for level in (1, 2, 3):
        assert max(run_ranks(2, body, level)) < 0.7 * whole


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_clears_the_model_too(level, to_none):
    def body(rank):
        model = build(2, 1, level)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        adopt(optimizer, {p: p for p in model.parameters()})
        model.loss(*batch()).backward()
        optimizer.zero_grad(set_to_none=to_none)
        for parameter in model.parameters():
            assert parameter.grad is None or not (to_none or parameter.grad.any())

    run_ranks(2, body)


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("maker", [torch.optim.SGD, torch.optim.Adafactor])
def test_schedulers_made_before_or_after(early, maker):
    """No warning that step was overridden or called in the wrong order (warnings are errors here)."""

    def body(rank):
        model = build(2, 1, 0)
        old = [torch.nn.Parameter(p.detach().clone()) for p in model.parameters()]
        optimizer = maker(old, lr=1.0)
        scheduler = schedule(optimizer) if early else None
        adopt(optimizer, dict(zip(old, model.parameters(), strict=True)))
        scheduler = scheduler or schedule(optimizer)
        train(model, optimizer, scheduler, range(3), model.loss)
        return optimizer.param_groups[0]["lr"]

    assert run_ranks(2, body) == [0.5, 0.5]


def test_tied_weights_are_in_the_optimizer_once():
    def body(rank):
        model = build(2, 1, 0)
        first, second = (torch.nn.Parameter(torch.zeros(5, 4)) for _ in range(2))
        optimizer = torch.optim.SGD([first, second], lr=0.1)
        adopt(optimizer, {first: model.p["embed"], second: model.p["embed"]})
        assert optimizer.param_groups[0]["params"] == [model.p["embed"]]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_ranks(2, body)


# -- optimizers that look at whole tensors -----------------------------------------------------

MESH = Mesh(axes=(Axis(name="dp", size=2), Axis(name="tp", size=2)))
SHAPES = {"rows": (6, 4), "columns": (4, 6), "whole": (5, 3)}


def helds(level):
    storage = parse_storage({"dp": level} if level else {})
    tp = MESH.axis("tp")
    cuts = {"rows": [[contiguous_shard(tp, 6)], []], "columns": [[], [contiguous_shard(tp, 6)]], "whole": [[], []]}
    return [
        ParameterSpec(
            keys=(k,), shape=SHAPES[k], dtype="float64", layout=make_layout(c, {"dp": REPLICATE}), storage=storage
        )
        for k, c in cuts.items()
    ]


def gradients(step):
    generator = torch.Generator().manual_seed(step)
    return {k: torch.randn(s, generator=generator, dtype=torch.float64) for k, s in SHAPES.items()}


class Sign(torch.optim.Optimizer):
    """An optimizer of the user's own; the update looks at the norm of everything."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        params = self.param_groups[0]["params"]
        total = sum(p.grad.square().sum() for p in params)
        for p in params:
            p.sub_(p.grad / total)


WHOLE = {
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.05, weight_decay=0.1),
    "muon": lambda params: torch.optim.Muon(params, lr=0.05),
    "own": Sign,
}


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("name", WHOLE)
def test_optimizers_that_need_whole_tensors_are_exact(name, level):
    plain = {k: torch.nn.Parameter(v) for k, v in gradients(99).items()}
    optimizer = WHOLE[name](plain.values())
    for step in range(3):
        for key, gradient in gradients(step).items():
            plain[key].grad = gradient
        optimizer.step()

    def body(rank):
        groups = Groups(MESH, wanted_groups(helds(level), MESH))
        at = coordinates(groups)
        full = gradients(99)
        by_key = {
            h.name: make_parameter(shard_tensor(full[h.name], h, MESH.sizes, at), h, groups) for h in helds(level)
        }
        optimizer = WHOLE[name](list(by_key.values()))
        adopt(optimizer, {p: p for p in by_key.values()})
        for step in range(3):
            for key, gradient in gradients(step).items():
                leaf = by_key[key].shard if level == 2 else by_key[key]
                set_raw_gradient(leaf, shard_tensor(gradient, by_key[key].spec, MESH.sizes, at, leaf.spread))
            optimizer.step()
        assert [p is q for p, q in zip(optimizer.param_groups[0]["params"], by_key.values(), strict=True)].count(
            False
        ) == (3 if level in (1, 2) else 0)
        kept = [v.numel() for s in optimizer.state.values() for k, v in s.items() if k == "momentum_buffer"]
        return (
            {k: gather_tensor(p.data, p.spec, groups) for k, p in by_key.items()},
            sum(kept),
            getattr(optimizer, "calls", 3),
        )

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="shardwright does not know")
        results = run_ranks(4, body)
    for got, kept, calls in results:
        assert calls == 3
        assert kept < sum(torch.zeros(s).numel() for s in SHAPES.values())
        for key, value in got.items():
            assert torch.equal(value, plain[key]), key


def test_lbfgs_with_a_closure():
    def loop(model, optimizer, loss):
        def closure():
            optimizer.zero_grad()
            value = loss(*batch())
            value.backward()
            return value

        for _ in range(2):
            optimizer.step(closure)

    single = Single()
    loop(single, torch.optim.LBFGS([p for p in single.parameters() if p.requires_grad], lr=0.1, max_iter=3), single)
    want = {n: p.detach() for n, p in single.named_parameters()}

    def body(rank):
        model = build(2, 2, 0)
        optimizer = torch.optim.LBFGS([p for p in model.parameters() if p.requires_grad], lr=0.1, max_iter=3)
        adopt(optimizer, {p: p for p in model.parameters()})
        dp = model.groups["dp"]

        def whole_loss(x, target):
            loss = model.loss(x, target)
            shown = loss.detach().clone()
            torch.distributed.all_reduce(shown, group=dp.process_group)
            return loss + (shown - loss.detach())

        loop(model, optimizer, whole_loss)
        return {name: model.whole(p) for name, p in model.p.items()}

    for got in run_ranks(4, body):
        assert_same(got, want, atol=1e-9)


@pytest.mark.parametrize(
    ("group", "wanted"),
    [({"foreach": None}, True), ({"foreach": False}, False), ({"foreach": None, "fused": True}, None), ({}, "absent")],
)
def test_foreach_is_asked_for_where_torch_would_choose_it(monkeypatch, group, wanted):
    """On a GPU torch takes its fast path for plain parameters only; an optimizer that has none is left alone."""
    monkeypatch.setattr(optimizer_module, "_device_has_foreach_support", lambda device: device.type == "meta")
    for device, expected in (("meta", wanted), ("cpu", group.get("foreach", "absent"))):
        stored = dict(group)
        optimizer_module._keep_foreach(stored, [torch.empty(2, device=device)])
        assert stored.get("foreach", "absent") is expected
    optimizer_module._keep_foreach(stored, [])


def test_what_an_optimizer_sees():
    params = [torch.nn.Parameter(torch.zeros(2, 2))]
    assert parameters_seen_by(torch.optim.AdamW(params)) == "element"
    assert parameters_seen_by(torch.optim.Muon(params)) == "matrix"
    assert parameters_seen_by(torch.optim.Adafactor(params)) == "tensor"
    assert parameters_seen_by(torch.optim.LBFGS(params)) == "everything"

    class Quiet(torch.optim.Adam):
        """Does not touch step."""

    class Loud(torch.optim.Adam):
        def step(self, closure=None):
            return super().step(closure)

    assert parameters_seen_by(Quiet(params)) == "element"
    with pytest.warns(UserWarning, match=r"Loud\.elementwise = True"):
        assert parameters_seen_by(Loud(params)) == "everything"
    Loud.elementwise = True
    assert parameters_seen_by(Loud(params)) == "element"


def _on_gloo(rank, level):
    return taken_over("adamw", 2, 1, level)


@pytest.mark.parametrize("level", [1, 3])
def test_on_gloo(level):
    want, rate = single_result("adamw")
    for got, lr in run_processes(2, _on_gloo, level, timeout=200):
        assert lr == rate
        assert_same(got, want, atol=1e-11)
