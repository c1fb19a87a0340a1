"""ZeRO-3: split parameters compute what whole ones do, and are whole only while they are needed."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef

from shardwright.errors import LayoutError
from shardwright.layout import REPLICATE, Axis, Mesh, make_layout
from shardwright.runtime.collectives import process_group
from shardwright.runtime.parameters import zero3 as zero_module
from shardwright.runtime.parameters.full_tensors import coordinates, gather_tensor, shard_tensor
from shardwright.runtime.parameters.gradient_sync import GradientSync
from shardwright.runtime.parameters.sharded import make_parameter
from shardwright.runtime.parameters.zero3 import UnitGatherer
from shardwright.runtime.world import Groups
from shardwright.storage import ParameterSpec, wanted_groups
from shardwright.storage.zero3 import Zero3
from tests.runtime.little import WIDTH as WIDTH_IN
from tests.runtime.little import Shards, Single, assert_same, batch, mesh_of, single_gradients, whole_values
from tests.runtime.ranks import run_processes, run_ranks

UNITS = {"root": ("embed", "scale", "gain"), "mlp": ("w1", "w2", "bias"), "rest": ("idle", "frozen")}


class Split(Shards):
    """The little model, in three units."""

    def __init__(self, mesh):
        super().__init__(mesh, level=3)
        pairs = {pair.name: (pair, parameter) for pair, parameter in self.pairs}
        units = {unit: [pairs[name] for name in names] for unit, names in UNITS.items()}
        self.zero = UnitGatherer(units, self.groups, list(UNITS))
        self.sync = GradientSync(self.pairs, self.groups)

    def loss(self, x, target):
        with self.zero.saving():
            values = {}
            for unit in UNITS:
                values.update(self.zero.open(unit))
            loss = super().loss(x, target, values)
            for unit in UNITS:
                self.zero.close(unit)
            return loss


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (3, 1), (4, 1), (2, 2), (1, 2)])
def test_one_backward_equals_a_single_device(dp, tp):
    """Uneven shares, a frozen parameter, one nobody uses, a scalar that stays whole, sums over tp too."""
    single = Single()
    single(*batch()).backward()

    def body(rank):
        model = Split(mesh_of(dp, tp))
        loss = model.loss(*batch())
        loss.backward()
        return model.whole_gradients()

    for got in run_ranks(dp * tp, body):
        assert_same(got, single_gradients(single))


def test_accumulation_and_two_forwards_and_retain_graph():
    single = Single()
    for step in range(2):
        single(*batch(step)).backward()
    loss = single(*batch(2)) + single(*batch(3))
    (2 * loss).backward()

    def body(rank):
        model = Split(mesh_of(2, 2))
        with model.sync.no_sync():
            model.loss(*batch(0)).backward()
        model.loss(*batch(1)).backward()
        both = model.loss(*batch(2)) + model.loss(*batch(3))
        both.backward(retain_graph=True)
        both.backward()
        return model.whole_gradients()

    for got in run_ranks(4, body):
        assert_same(got, single_gradients(single))


@pytest.mark.parametrize("wire", [None, torch.float32])
def test_gradients_are_summed_in_the_dtype_that_is_asked_for(monkeypatch, wire):
    sent = []
    reduce = process_group.reduce_scatter
    monkeypatch.setattr(
        process_group, "reduce_scatter", lambda row, *rest: sent.append(row.dtype) or reduce(row, *rest)
    )

    def body(rank):
        zero, _, _ = make_chain(2, wire=wire)
        run_chain(zero, rows_of(rank, 2)[1]).sum().backward()

    run_ranks(2, body)
    assert set(sent) == {wire or torch.float64}


def test_a_saved_parameter_can_be_looked_at_outside_of_backward():
    """A debugger that prints what autograd saved gets the whole parameter, gathered for it."""

    def body(rank):
        model = Split(mesh_of(2))
        with model.zero.saving():
            x = torch.ones(1, WIDTH_IN, dtype=torch.float64, requires_grad=True)
            built = x @ model.zero.open("mlp")["w1"].t()
            model.zero.close("mlp")
        return built.grad_fn._saved_mat2.clone().t()

    for got in run_ranks(2, body):
        assert torch.equal(got, whole_values()["w1"])


def test_and_after_a_backward_that_raised():
    def stop(gradient):
        raise ValueError("stopped by a hook")

    def body(rank):
        model = Split(mesh_of(2))
        with model.zero.saving():
            x = torch.ones(1, WIDTH_IN, dtype=torch.float64, requires_grad=True)
            weight = model.zero.open("mlp")["w1"]
            first, second = (2 * x) @ weight.t(), x @ weight.t()
            model.zero.close("mlp")
        x.register_hook(stop)
        with pytest.raises(ValueError, match="stopped by a hook"):
            torch.autograd.grad(first.sum(), x)
        return second.grad_fn._saved_mat2.clone().t()

    for got in run_ranks(2, body):
        assert torch.equal(got, whole_values()["w1"])


# -- a chain of layers ---------------------------------------------------------------------

LAYERS, WIDTH = 5, 6


def layer_values():
    generator = torch.Generator().manual_seed(3)
    names = [f"{layer}.{name}" for layer in range(LAYERS) for name in ("w", "b")]
    shapes = [(WIDTH, WIDTH), (WIDTH,)] * LAYERS
    return {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in zip(names, shapes, strict=True)}


def make_chain(n, frozen=(), wire=None):
    mesh = Mesh(axes=(Axis(name="dp", size=n),))
    full = layer_values()
    helds = [
        ParameterSpec(
            keys=(key,),
            shape=tuple(value.shape),
            dtype="float64",
            layout=make_layout([[] for _ in value.shape], {} if key in frozen else {"dp": REPLICATE}),
            storage=Zero3(("dp",)),
            trainable=key not in frozen,
        )
        for key, value in full.items()
    ]
    groups = Groups(mesh, wanted_groups(helds, mesh))
    pairs = {
        h.name: (h, make_parameter(shard_tensor(full[h.name], h, mesh.sizes, coordinates(groups)), h, groups))
        for h in helds
    }
    units = {str(layer): [pairs[f"{layer}.w"], pairs[f"{layer}.b"]] for layer in range(LAYERS)}
    return UnitGatherer(units, groups, list(units), wire), pairs, groups


def run_chain(zero, x, recompute=False):
    def layer(x, at):
        p = zero.open(at)
        y = torch.tanh(F.linear(x, p[f"{at}.w"], p[f"{at}.b"]))
        zero.close(at)
        return y

    with zero.saving():
        for at in range(LAYERS):
            if recompute:
                x = torch.utils.checkpoint.checkpoint(layer, x, str(at), use_reentrant=False)
            else:
                x = layer(x, str(at))
    return x


def single_chain(x, frozen=()):
    values = {k: v.clone().requires_grad_(k not in frozen) for k, v in layer_values().items()}
    for at in range(LAYERS):
        x = torch.tanh(F.linear(x, values[f"{at}.w"], values[f"{at}.b"]))
    x.sum().backward()
    return {k: v.grad for k, v in values.items()}


def rows_of(rank, n):
    x = torch.randn(4 * n, WIDTH, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    return x, x[rank * 4 : rank * 4 + 4]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("frozen", [(), ("1.w", "1.b", "2.w"), ("4.w", "4.b")])
@pytest.mark.parametrize("n", [2, 4])
def test_a_chain_of_units(n, frozen, recompute):
    def body(rank):
        zero, pairs, groups = make_chain(n, frozen)
        run_chain(zero, rows_of(rank, n)[1], recompute).sum().backward()
        grads = {k: p.grad for k, (_, p) in pairs.items()}
        return {k: None if g is None else gather_tensor(g, pairs[k][0], groups) for k, g in grads.items()}

    want = single_chain(rows_of(0, n)[0], frozen)
    for got in run_ranks(n, body):
        assert_same(got, want)


def watch(monkeypatch):
    """Weak references to the memory of everything that was gathered, by rank."""
    seen = []
    real = zero_module.GatheredUnit.wait

    def wait(self):
        fresh = self.flat is None
        flat = real(self)
        if fresh:
            seen.append((dist.get_rank(), StorageWeakRef(flat.untyped_storage())))
        return flat

    monkeypatch.setattr(zero_module.GatheredUnit, "wait", wait)
    return seen


def test_nothing_gathered_lives_from_forward_to_backward(monkeypatch):
    seen = watch(monkeypatch)

    def alive(rank):
        gc.collect()
        return sum(not reference.expired() for at, reference in list(seen) if at == rank)

    def body(rank):
        zero, _, _ = make_chain(2)
        y = run_chain(zero, rows_of(rank, 2)[1])
        between = alive(rank)
        most = []
        y.register_hook(lambda _: None)
        inside = zero._returned

        def returned(*args):
            most.append(alive(rank))
            inside(*args)

        zero._returned = returned
        y.sum().backward()
        return between, max(most), alive(rank)

    for between, most, after in run_ranks(2, body):
        assert between == 0
        assert most <= 2  # the unit that is used, and the one fetched ahead
        assert after == 0


def test_without_saving_autograd_keeps_them(monkeypatch):
    """The test above can fail."""
    seen = watch(monkeypatch)

    def body(rank):
        zero, _, _ = make_chain(2)
        x = rows_of(rank, 2)[1]
        for at in map(str, range(LAYERS)):
            p = zero.open(at)
            x = torch.tanh(F.linear(x.clone().requires_grad_(), p[f"{at}.w"], p[f"{at}.b"]))
            zero.close(at)
        del p
        gc.collect()
        count = sum(not reference.expired() for at, reference in list(seen) if at == rank)
        x.sum().backward()
        return count

    assert run_ranks(2, body) == [LAYERS, LAYERS]


def test_one_gather_a_unit_and_direction_and_one_reduce(monkeypatch):
    calls = []
    for name in ("all_gather_single", "reduce_scatter_single"):
        real = getattr(dist, name)

        def counted(*args, real=real, name=name, **kwargs):
            calls.append((dist.get_rank(), name))
            return real(*args, **kwargs)

        monkeypatch.setattr(dist, name, counted)

    def body(rank):
        zero, _, _ = make_chain(2)
        run_chain(zero, rows_of(rank, 2)[1]).sum().backward()

    run_ranks(2, body)
    mine = [name for rank, name in calls if rank == 0]
    # layer 0's input has no gradient, so its weight is not needed again; it may have been fetched ahead
    assert mine.count("all_gather_single") in (2 * LAYERS - 1, 2 * LAYERS)
    assert mine.count("reduce_scatter_single") == LAYERS


def test_what_was_fetched_ahead_is_not_used_stale():
    def body(rank):
        zero, pairs, _ = make_chain(2)
        with torch.no_grad():
            zero.open("0")  # fetches "1" ahead
            zero.close("0")
            pairs["1.w"][1].mul_(3)
            got = zero.open("1")["1.w"].clone()
            zero.close("1")
        return got

    for got in run_ranks(2, body):
        assert torch.equal(got, layer_values()["1.w"] * 3)


def test_a_backward_that_raised_leaves_no_trace():
    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ArithmeticError("on purpose")

    def body(rank):
        zero, pairs, groups = make_chain(2)
        x = rows_of(rank, 2)[1]
        with pytest.raises(ArithmeticError):
            run_chain(zero, Breaks.apply(x.clone().requires_grad_())).sum().backward()
        for _, parameter in pairs.values():
            parameter.grad = None
        run_chain(zero, x).sum().backward()
        return {k: gather_tensor(p.grad, h, groups) for k, (h, p) in pairs.items()}

    want = single_chain(rows_of(0, 2)[0])
    for got in run_ranks(2, body):
        assert_same(got, want)


def test_an_order_with_unknown_units_is_refused():
    with pytest.raises(LayoutError, match=r"blocks\.7"):
        UnitGatherer({}, None, ["blocks.7"])


def _on_gloo(rank):
    model = Split(mesh_of(2))
    model.loss(*batch(0)).backward()
    model.loss(*batch(1)).backward()
    return model.whole_gradients()


def test_on_gloo():
    single = Single()
    for step in range(2):
        single(*batch(step)).backward()
    for got in run_processes(2, _on_gloo, timeout=200):
        assert_same(got, single_gradients(single))
