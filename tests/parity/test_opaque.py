"""Opaque submodules in compiled programs: the same loss, gradients, buffers and parameters as on one device."""

import copy
import tempfile

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from tests.options import grouped

from ..models.odd import Branching, Memory, Net, Rows, data
from ..runtime.ranks import run_ranks


def verified(model: nn.Module, plan: str, example: tuple[object, ...], **options: object) -> None:
    report = sw.verify(model, plan, example=example, method="threads", entries=("train", "eval"), **grouped(**options))
    assert report, str(report)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "dp=2,tp=2", "zero2=2", "zero3=2", "sp=2"])
def test_run_whole(plan):
    verified(Net(Branching(), Rows()), plan, data())


@pytest.mark.parametrize("plan", ["dp=2", "zero3=2", "dp=2,tp=2"])
def test_split_on_its_batch(plan):
    verified(Net(Branching(), Rows(), batch=True), plan, data())


def test_rows_that_decide_differently_on_every_rank():
    """Rank 0 takes one way, rank 1 the other, on which nothing has a gradient: neither waits for the other."""

    class Decides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return torch.stack([self.linear(row) if row[0].item() > 0 else torch.ones_like(row) for row in x])

    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.decides = nn.Linear(4, 4), sw.opaque(Decides(), batch=True)

        def forward(self, x):
            return (self.decides(x + self.first(x) * 0.01) ** 2).mean()

    x = torch.rand(4, 4) + 1
    x[2:] *= -1
    verified(Holds(), "dp=2", (x,))
    verified(Holds(), "zero3=2", (x,))


def test_split_on_its_batch_in_the_text(tmp_path):
    sw.verify(
        Net(Branching(), Rows(), batch=True), "dp=2", example=data(), method="threads", compile={"directory": tmp_path}
    )
    [file] = tmp_path.glob("*/train*.py")
    [line] = [line for line in file.read_text().splitlines() if '"block"' in line]
    assert line.split("#")[0].strip() == 'x_1 = self.opaque("block", x, over=self.dp)'


def test_recurrent_layers_inside():
    verified(Net(Branching(), Memory()), "dp=2", data())


def test_dropout_inside_is_drawn_alike_on_all_ranks():
    verified(Net(Branching(), Rows(drop=0.5)), "dp=2", data())


def test_layers_with_opaque_parts_are_one_loop(tmp_path):
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.rows = nn.Linear(4, 4), sw.opaque(Rows(), batch=True)

        def forward(self, x):
            return x + self.rows(self.linear(x))

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return (x**2).mean()

    verified(Deep(), "zero3=2", (data()[0],), directory=tmp_path)
    text = next(tmp_path.glob("*/train*.py")).read_text()
    assert "for at in self.layers" in text
    assert 'self.opaque(f"{at}.rows", ' in text


class Recomputed(nn.Module):
    """Recomputes a branch on data in backward, when the program has gone on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def inner(self, x):
        return self.linear(x).tanh() if x.detach().numpy().any() else x

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


class Positions(nn.Module):
    """Depends on parameters only."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 4))

    def forward(self) -> torch.Tensor:
        return self.table * float(self.table.detach().abs().max().item() > 0)


class Around(nn.Module):
    """Opaque parts in places of their own: in a checkpointed region, without inputs, frozen and without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.recomputed, self.positions = sw.opaque(Recomputed()), sw.opaque(Positions())
        self.frozen = sw.opaque(Rows()).requires_grad_(False)

    def forward(self, x):
        x = checkpoint(lambda x: self.recomputed(self.first(x)), x, use_reentrant=False)
        x = self.recomputed(x) + self.positions()
        with torch.no_grad():
            scale = self.frozen(x)
        return (self.last(self.frozen(x)) * scale).pow(2).mean()


@pytest.mark.parametrize("plan", ["dp=2", "zero3=2", "dp=2,tp=2"])
def test_in_odd_places(plan):
    verified(Around(), plan, (torch.randn(6, 4),))


def test_the_plan_says_what_runs_whole():
    notes = sw.plan(Net(Branching(), Rows()), example=data(), plan="dp=2").notes
    assert any(note.startswith("odd / opaque") and "runs replicated on every device" in note for note in notes)


def test_the_ordinary_loop_another_batch_size_and_eval():
    """Every program asks again what its opaque parts return, and they go on remembering."""
    torch.manual_seed(3)
    net = Net(Branching(), Rows(), batch=True, drop=0.0).double()
    x, y = (batch.double() for batch in data())
    original = copy.deepcopy(net)
    steps = [(x, y), (x[:4], y[:4]), (x, y)]

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        collected = []
        for step, other in steps:
            loss = model(step, other)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            collected.append(loss.item())
        model.eval()
        collected.append(model(x, y).item())
        return collected

    expected = run(original, torch.optim.SGD(original.parameters(), lr=0.1))
    folder = tempfile.mkdtemp()

    def rank(number: int) -> tuple[list[float], dict[str, torch.Tensor]]:
        mine = copy.deepcopy(net)
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
        model, optimizer = sw.parallelize(mine, optimizer, plan="zero3=2", compile={"directory": folder})
        return run(model, optimizer), model.full_state_dict()

    for losses, state in run_ranks(2, rank):
        assert losses == pytest.approx(expected, abs=1e-10)
        for key, tensor in original.state_dict().items():
            torch.testing.assert_close(state[key], tensor, rtol=1e-10, atol=1e-10)


def test_a_part_that_is_put_to_eval_on_its_own():
    net = Net(Branching(), Rows(), drop=0.0).double()
    x, y = (batch.double() for batch in data())
    folder = tempfile.mkdtemp()

    def rank(number: int) -> tuple[float, float, torch.Tensor]:
        model = sw.parallelize(copy.deepcopy(net), plan="dp=2", compile={"directory": folder})
        left = model(x, y).item()
        model.odd.eval()
        return left, model(x, y).item(), model.odd.norm.running_mean.clone()

    original = copy.deepcopy(net)
    first = original(x, y).item()
    original.odd.eval()
    other, mean = original(x, y).item(), original.odd.norm.running_mean
    assert abs(first - other) > 1e-3
    for result in run_ranks(2, rank):
        assert result[:2] == pytest.approx((first, other), abs=1e-10)
        torch.testing.assert_close(result[2], mean, rtol=1e-10, atol=1e-10)


def test_rows_mode():
    net = Net(Branching(), Rows(), drop=0.0).double()
    x, y = (batch.double() for batch in data())
    expected = copy.deepcopy(net)(x, y)
    folder = tempfile.mkdtemp()

    def rank(number: int) -> float:
        model = sw.parallelize(copy.deepcopy(net), plan="dp=2", inputs="per_replica", compile={"directory": folder})
        mine = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
        return model(x[mine], y[mine]).item()

    assert run_ranks(2, rank) == pytest.approx([expected.item()] * 2, abs=1e-10)


def job(rank: int, state: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor, folder: str) -> list[float]:
    net = Net(Branching(), Rows(), drop=0.0).double()
    net.load_state_dict(state)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model, optimizer = sw.parallelize(net, optimizer, plan="zero3=2", compile={"directory": folder})
    actual = [train(model, optimizer, x, y), train(model, optimizer, x[:4], y[:4])]
    return [*actual, model.eval()(x, y).item()]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> float:
    loss = model(x, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.item())


def test_on_processes(pools, tmp_path):
    """A smaller batch and eval are programs of their own, for which the whole model is gathered and run once."""
    net = Net(Branching(), Rows(), drop=0.0).double()
    x, y = (batch.double() for batch in data())
    results = pools[2].run(job, copy.deepcopy(net.state_dict()), x, y, str(tmp_path))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    expected = [train(net, optimizer, x, y), train(net, optimizer, x[:4], y[:4]), net.eval()(x, y).item()]
    assert results == [pytest.approx(expected, abs=1e-10)] * 2
