"""What a training state has besides parameters and AdamW: all of it comes back."""

from __future__ import annotations

import copy
import random

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import shardwright as sw
from shardwright.checkpoint import open_checkpoint
from shardwright.checkpoint.index import IndexReader
from shardwright.checkpoint.key_owners import KeyOwners
from shardwright.checkpoint.training import merge_stages
from shardwright.errors import CheckpointError, InputError
from shardwright.runtime.parameters.state_values import ShardTensor
from tests.models.zoo import ZOO
from tests.runtime.ranks import run_ranks

from .little import little, train
from .runs import make_run, steps, values


def test_what_stages_have_in_extra_objects_is_joined_and_the_first_has_the_last_word():
    def message(**ema):
        return {"optimizers": [], "extra": {"ema": ema}}

    first = message(shared={"$": "tensor", "key": "x"}, mine={"a": 1}, plain={"$": "tuple", "items": []})
    two = message(shared={"$": "tensor", "key": "y", "more": 1}, mine={"b": 2}, plain={"c": 3}, late=4)

    assert merge_stages([first, None, two], KeyOwners(little()[0]))["extra"] == {
        "ema": {"shared": {"$": "tensor", "key": "x"}, "mine": {"a": 1, "b": 2},
                "plain": first["extra"]["ema"]["plain"],
                "late": 4}
    }  # fmt: skip


def draws():
    return [
        torch.rand(1).item(),
        float(numpy.random.rand()),
        float(numpy.random.randn()),
        random.random(),
        random.gauss(0, 1),
    ]


def test_generators_go_on(tmp_path):
    random.gauss(0, 1)  # leaves half a pair behind
    numpy.random.randn()
    net, optimizer = little()
    sw.save(tmp_path / "x", net, optimizer)
    wanted = draws()
    sw.load(tmp_path / "x", net, optimizer, rng=False)
    assert draws() != wanted
    sw.load(tmp_path / "x", net, optimizer)
    assert draws() == wanted


def save_drawing(rank, folder):
    torch.manual_seed(100 + rank)
    run = make_run("mlp", "momentum", "dp=2", folder)
    torch.manual_seed(100 + rank)
    sw.save(f"{folder}/x", run[0], run[1])
    return torch.rand(1).item()


def load_drawing(rank, folder):
    run = make_run("mlp", "momentum", "dp=4", folder)
    sw.load(f"{folder}/x", run[0], run[1])
    return torch.rand(1).item()


def test_more_ranks_take_the_generators_in_turn(pools, tmp_path):
    first, second = pools[2].run(save_drawing, str(tmp_path), timeout=120)
    assert first != second
    assert pools[4].run(load_drawing, str(tmp_path), timeout=120) == [first, second, first, second]


def test_what_the_model_draws_goes_on(tmp_path):
    """Dropout of a compiled model draws by a step, which is saved."""

    def start():
        case = ZOO["dropout_gpt"](dtype=torch.float64)
        optimizer = torch.optim.SGD(case.module.parameters(), lr=0.1)
        return case, *sw.parallelize(
            case.module, optimizer, plan="single", example=case.args, compile={"directory": tmp_path}
        )

    case, model, optimizer = start()
    for _ in range(2):
        model(*case.args)
    sw.save(tmp_path / "x", model, optimizer)
    wanted = [model(*case.args).item() for _ in range(2)]
    assert wanted[0] != wanted[1]
    case, model, optimizer = start()
    sw.load(tmp_path / "x", model, optimizer)
    assert [model(*case.args).item() for _ in range(2)] == wanted


def test_buffers_are_saved_unless_they_are_rebuilt(tmp_path):
    net, optimizer = little()
    train(net, optimizer, 2)
    sw.save(tmp_path / "x", net, optimizer)
    keys = set(open_checkpoint(tmp_path / "x").index.entries)
    assert {"model/norm.running_mean", "model/norm.num_batches_tracked", "model/up.weight"} <= keys
    assert not {"model/table", "model/head.weight"} & keys  # not persistent, and tied
    other, fresh = little(1)
    sw.load(tmp_path / "x", other, fresh)
    for key, tensor in net.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[key]), key
    assert other.head.weight is other.up.weight


class Scaled(nn.Module):
    """A buffer that is loaded, and what is computed of it alone, which a program computes once."""

    def __init__(self, norm):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(4, 8), nn.Linear(8, 4), norm
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x):
        return self.down((self.norm(self.up(x)) * (2 * self.scale).exp()).relu()).square().mean()


@pytest.mark.parametrize("plan", ["tp=2", "pp=2"])
def test_what_is_computed_of_buffers_once_is_computed_again(tmp_path, plan):
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(8) if plan == "tp=2" else nn.LayerNorm(8)
    net, other, x = Scaled(norm).double(), Scaled(norm).double(), torch.randn(6, 4, dtype=torch.float64)
    other.scale.copy_(torch.linspace(0, 1, 8))
    sw.save(tmp_path / "x", other)

    def go(model):
        seen = [model(x).item(), model.eval()(x).item(), model.train()(x).item(), model.eval()(x).item()]
        sw.load(tmp_path / "x", model, rng=False)
        return [*seen, model(x).item(), model.train()(x).item()]

    nets = [copy.deepcopy(net) for _ in range(2)]
    wanted = go(net)
    for result in run_ranks(
        2, lambda rank: go(sw.parallelize(nets[rank], plan=plan, compile={"directory": tmp_path / "made"}))
    ):
        assert result == pytest.approx(wanted, rel=1e-10)


class Counter:
    """Something with a state of its own."""

    def __init__(self) -> None:
        self.state = {"count": 0, "sum": torch.zeros(2)}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_data_metrics_and_extra_come_back(tmp_path):
    net, optimizer = little()
    counter, scaler = Counter(), torch.amp.GradScaler("cpu", init_scale=8.0)
    counter.state = {"count": 3, "sum": torch.ones(2)}
    extra = {"counter": counter, "scaler": scaler, "note": ("a", 1), "tensor": torch.arange(3)}
    sw.save(tmp_path / "x", net, optimizer, data={"epoch": 2, "row": 1024}, step=7, metrics={"loss": 0.5}, extra=extra)
    other, scaled = Counter(), torch.amp.GradScaler("cpu", init_scale=2.0)
    loaded = sw.load(tmp_path / "x", net, optimizer, extra={"counter": other, "scaler": scaled})
    assert (loaded.step, loaded.data, loaded.metrics, loaded.world) == (7, {"epoch": 2, "row": 1024}, {"loss": 0.5}, 1)
    assert other.state["count"] == 3 and torch.equal(other.state["sum"], torch.ones(2))
    assert scaled.get_scale() == 8.0
    assert loaded.extra["note"] == ("a", 1) and torch.equal(loaded.extra["tensor"], torch.arange(3))
    assert loaded.versions["torch"] == torch.__version__


class Averaged:
    """Averages of the weights, in the shards that the weights are in."""

    def __init__(self, model):
        self.model = model
        self.state = {key: value.clone() for key, value in model.state_dict().items()}

    def state_dict(self):
        return {"averages": self.state}

    def load_state_dict(self, state):
        mine = self.state.keys()
        self.state = {key: value for key, value in state["averages"].items() if key in mine}


def averages(rank, plan, saved, folder):
    run = make_run("gpt", "momentum", plan, folder)
    steps(run, "gpt", 1)
    stored = Averaged(run[0])
    if saved:
        sw.save(f"{folder}/x", run[0], run[1], extra={"averages": stored})
    else:
        stored.state = {key: value.clone() for key, value in stored.state.items()}
        sw.load(f"{folder}/x", run[0], run[1], extra={"averages": stored})
    kinds = {type(value) for value in stored.state.values()}
    whole = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in stored.state.items()}
    return whole, values(run[0]), ShardTensor in kinds


@pytest.mark.parametrize("before", ["tp=2", "pp=2"])
def test_shards_in_extra_objects_go_from_plan_to_plan(pools, tmp_path, before):
    pools[2].run(averages, before, True, str(tmp_path), timeout=120)
    for whole, wanted, cut in pools[2].run(averages, "tp=2", False, str(tmp_path), timeout=120):
        assert cut
        assert whole.keys() == wanted.keys()
        for key, value in wanted.items():
            torch.testing.assert_close(whole[key], value, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=4),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
        lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.9),
        lambda p: torch.optim.ASGD(p, lr=0.01),
        lambda p: torch.optim.Rprop(p, lr=0.01),
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    ],
)
def test_any_optimizer(tmp_path, make):
    x = torch.randn(5, 4, dtype=torch.float64)

    def go(net, optimizer, count):
        def closure():
            optimizer.zero_grad()
            loss = net(x)
            loss.backward()
            return loss

        return [float(optimizer.step(closure).detach()) for _ in range(count)]

    net, _ = little()
    optimizer = make(net.parameters())
    go(net, optimizer, 2)
    sw.save(tmp_path / "x", net, optimizer)
    wanted = go(net, optimizer, 3)
    other, _ = little(1)
    fresh = make(other.parameters())
    sw.load(tmp_path / "x", other, fresh)
    assert go(other, fresh, 3) == wanted


def test_several_optimizers(tmp_path):
    def start(seed):
        net, _ = little(seed)
        return net, [torch.optim.AdamW(net.up.parameters()), torch.optim.SGD(net.down.parameters(), momentum=0.9)]

    net, both = start(0)
    net(torch.ones(3, 4, dtype=torch.float64)).backward()
    for value in both:
        value.step()
    sw.save(tmp_path / "x", net, both)
    other, fresh = start(1)
    sw.load(tmp_path / "x", other, fresh)
    for mine, wanted in zip(fresh, both, strict=True):
        assert repr(mine.state_dict()) == repr(wanted.state_dict())


def test_a_model_that_is_compiled_later(tmp_path):
    net, optimizer = little()
    x = torch.randn(4, 4, dtype=torch.float64)

    def go(net, optimizer):
        loss = net(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    go(net, optimizer)
    sw.save(tmp_path / "x", net, optimizer)
    wanted = [go(net, optimizer) for _ in range(3)]
    states = [little(number) for number in (4, 5)]

    def rank(number):
        model, stored = sw.parallelize(*states[number], plan="tp=2", compile={"directory": tmp_path / "generated"})
        sw.load(tmp_path / "x", model, stored, rng=False)
        return [go(model, stored) for _ in range(3)]

    for result in run_ranks(2, rank):
        assert result == pytest.approx(wanted, rel=1e-10)


def test_dcp_reads_it_with_our_reader(tmp_path):
    net, optimizer = little()
    sw.save(tmp_path / "x", net, optimizer)
    wanted = {
        f"model/{key}": torch.zeros_like(tensor) for key, tensor in net.state_dict().items() if key != "head.weight"
    }
    with pytest.warns(UserWarning, match="assuming the intent is to load in a single process"):
        dcp.load(wanted, storage_reader=IndexReader(open_checkpoint(tmp_path / "x").index), no_dist=True)
    assert torch.equal(wanted["model/up.weight"], net.up.weight)


# -- what does not fit ---------------------------------------------------------------------------


def test_all_that_does_not_fit_is_named_and_nothing_is_changed(tmp_path):
    net, optimizer = little()
    sw.save(tmp_path / "x", net, optimizer)

    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.more = nn.Linear(4, 6).double(), nn.Linear(2, 2)

    other = Other()
    before = other.up.weight.clone()
    with pytest.raises(CheckpointError, match=r"(?s)missing: more.weight.*missing: more.bias.*unexpected: down.bias"):
        sw.load(tmp_path / "x", other)
    assert torch.equal(other.up.weight, before)
    sw.load(tmp_path / "x", other, strict=False)
    assert torch.equal(other.up.weight, net.up.weight)
    other.up = nn.Linear(4, 5).double()
    with pytest.raises(CheckpointError, match=r"up.weight has shape \(5, 4\), and was saved with \(6, 4\)"):
        sw.load(tmp_path / "x", other, strict=False)


def test_an_optimizer_of_other_groups_is_refused(tmp_path):
    net, optimizer = little()
    train(net, optimizer, 1)
    sw.save(tmp_path / "x", net)
    with pytest.raises(CheckpointError, match=r"1 optimizer\(s\) are to be loaded, and 0 were saved"):
        sw.load(tmp_path / "x", net, optimizer)
    halves = torch.optim.AdamW([{"params": net.up.parameters()}, {"params": net.down.parameters()}])
    sw.save(tmp_path / "x", net, halves)
    with pytest.raises(CheckpointError, match=r"(?s)does not fit the saved one \(AdamW\).*norm.weight"):
        sw.load(tmp_path / "x", net, optimizer)
    joined = torch.optim.AdamW([*net.up.parameters(), *net.down.parameters()])
    with pytest.raises(CheckpointError, match=r"the parameters of group 0 were in groups \[0, 1\] of 2"):
        sw.load(tmp_path / "x", net, joined)


def test_a_place_that_is_taken_is_not_overwritten(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="exists and is not a checkpoint"):
        sw.save(tmp_path / "x", little()[0])
    assert (tmp_path / "x" / "thesis.txt").exists()


def test_what_can_not_be_saved_is_named(tmp_path):
    net, optimizer = little()
    with pytest.raises(InputError, match="extra/it is a object"):
        sw.save(tmp_path / "x", net, optimizer, extra={"it": object()})
    with pytest.raises(InputError, match="that the model does not have"):
        sw.save(tmp_path / "x", net, torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1))
    assert list(tmp_path.iterdir()) == []
