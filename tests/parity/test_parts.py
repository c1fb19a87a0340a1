"""Parts of a module compiled, the rest ordinary Python beside them: together the same as on one device."""

from __future__ import annotations

import copy
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardwright as sw
from shardwright.errors import InputError
from tests.options import grouped

from ..runtime.ranks import run_ranks
from .threaded import world_of


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Outer(nn.Module):
    """Any Python around a heavy part: a branch on data, a list, a count."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.backbone = nn.Sequential(Block(), Block())
        self.other = Block()
        self.head = nn.Linear(8, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.embed(x)
        if x.abs().max().item() > 1e6:
            raise ValueError("too large")
        x = self.backbone(x) + self.other(x)
        return self.head(x)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return loss.detach(), norm.detach()


def whole(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        key: (value.full_tensor() if hasattr(value, "full_tensor") else value).clone() for key, value in state.items()
    }


@pytest.fixture
def case() -> tuple[Outer, Tensor, Tensor]:
    torch.manual_seed(0)
    return Outer().double(), torch.randn(8, 4).double(), torch.randint(0, 3, (8,))


Steps = list[tuple[Tensor, Tensor]]


def expected(case: tuple[Outer, Tensor, Tensor], steps: int = 3) -> tuple[Steps, dict[str, Tensor]]:
    net, x, y = case
    net = copy.deepcopy(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    return [step(net, optimizer, x, y) for _ in range(steps)], net.state_dict()


def assert_same(actual: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert list(actual) == list(wanted)
    for key, expected in wanted.items():
        torch.testing.assert_close(
            actual[key], expected, rtol=1e-10, atol=1e-10, msg=lambda text, key=key: f"{key}: {text}"
        )


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero1=2", "zero3=2", "dp=2,tp=2"])
@pytest.mark.parametrize("parts", [["backbone"], ["backbone", "other"]])
def test_every_rank_passes_the_global_batch(case, plan, parts):
    losses, state = expected(case)
    folder = tempfile.mkdtemp()
    nets = [copy.deepcopy(case[0]) for _ in range(world_of(plan))]
    with torch.no_grad():
        nets[1].head.weight.add_(1)  # an unseeded script: what rank 0 has counts

    def rank(number: int) -> tuple[Steps, dict[str, Tensor]]:
        mine = nets[number]
        optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-2)
        model, same = sw.parallelize(mine, optimizer, compile={"parts": parts, "directory": folder}, plan=plan)
        assert model is mine
        assert same is optimizer
        return [step(model, optimizer, *case[1:]) for _ in range(3)], whole(model.state_dict())

    for result, mine in run_ranks(world_of(plan), rank):
        torch.testing.assert_close(result, losses, rtol=1e-10, atol=1e-10)
        assert_same(mine, state)


@pytest.mark.parametrize("plan", ["dp=2", "zero3=2", "dp=2,tp=2"])
def test_every_group_passes_its_rows(case, plan):
    losses, state = expected(case)
    folder = tempfile.mkdtemp()
    nets = [copy.deepcopy(case[0]) for _ in range(world_of(plan))]

    def rank(number: int) -> tuple[Steps, dict[str, Tensor]]:
        optimizer = torch.optim.AdamW(nets[number].parameters(), lr=1e-2)
        options = {"plan": plan, "inputs": "per_replica", "directory": folder}
        model, optimizer = sw.parallelize(nets[number], optimizer, **grouped(parts=["backbone"], **options))
        assert model.backbone.data_size == 2
        mine = slice(4 * model.backbone.data_rank, 4 * model.backbone.data_rank + 4)
        results = [step(model, optimizer, case[1][mine], case[2][mine]) for _ in range(3)]
        return results, whole(model.state_dict())

    every = run_ranks(world_of(plan), rank)
    apart = world_of(plan) // 2
    for value, mine in every:
        assert_same(mine, state)
        torch.testing.assert_close([norm for _, norm in value], [norm for _, norm in losses], rtol=1e-10, atol=1e-10)
    means = [(a[0] + b[0]) / 2 for a, b in zip(every[0][0], every[apart][0], strict=True)]
    torch.testing.assert_close(means, [loss for loss, _ in losses], rtol=1e-10, atol=1e-10)


def test_gradients_of_two_passes_are_synced_at_the_second(case):
    net, x, y = case
    original = copy.deepcopy(net)
    for part in (slice(0, 4), slice(4, 8)):
        (F.cross_entropy(original(x[part]), y[part]) / 2).backward()
    folder = tempfile.mkdtemp()
    nets = [copy.deepcopy(net) for _ in range(2)]

    def rank(number: int) -> list[Tensor]:
        options = {"plan": "dp=2", "inputs": "per_replica", "accumulate": 2, "directory": folder}
        model = sw.parallelize(nets[number], **grouped(parts=["backbone"], **options))
        for start in (0, 4):
            mine = slice(start + 2 * dist.get_rank(), start + 2 * dist.get_rank() + 2)
            (F.cross_entropy(model(x[mine]), y[mine]) / 2).backward()
        return [model.embed.weight.grad.clone(), model.head.bias.grad.clone()]

    for result in run_ranks(2, rank):
        wanted = [original.embed.weight.grad, original.head.bias.grad]
        torch.testing.assert_close(result, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("early", [True, False])
def test_a_part_that_is_put_in_its_place_by_hand(case, early):
    losses, state = expected(case)
    folder = tempfile.mkdtemp()
    nets = [copy.deepcopy(case[0]) for _ in range(2)]

    def rank(number: int) -> tuple[Steps, dict[str, Tensor]]:
        model, example = nets[number], torch.zeros(8, 8).double().requires_grad_()
        if early:
            model.backbone = sw.parallelize(model.backbone, plan="tp=2", example=example, compile={"directory": folder})
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            model.backbone, optimizer = sw.parallelize(
                model.backbone, optimizer, plan="tp=2", compile={"directory": folder}
            )
        return [step(model, optimizer, *case[1:]) for _ in range(3)], whole(model.state_dict())

    for result, mine in run_ranks(2, rank):
        torch.testing.assert_close(result, losses, rtol=1e-10, atol=1e-10)
        assert_same(mine, state)


def test_a_checkpoint_of_one_plan_goes_on_under_another(case, tmp_path):
    losses, state = expected(case, steps=4)

    def start(number: int, plan: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        net = copy.deepcopy(case[0])
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        parts = {"backbone": plan, "other": plan}
        return sw.parallelize(net, optimizer, compile={"parts": parts, "directory": tmp_path / plan})

    def first(number: int) -> None:
        model, optimizer = start(number, "tp=2")
        for _ in range(2):
            step(model, optimizer, *case[1:])
        sw.save(tmp_path / "checkpoint", model, optimizer)

    def second(number: int) -> tuple[Steps, dict[str, Tensor]]:
        model, optimizer = start(number, "zero1=2")
        model(case[1])
        sw.load(tmp_path / "checkpoint", model, optimizer)
        return [step(model, optimizer, *case[1:]) for _ in range(2)], whole(model.state_dict())

    run_ranks(2, first)
    for result, mine in run_ranks(2, second):
        torch.testing.assert_close(result, losses[2:], rtol=1e-10, atol=1e-10)
        assert_same(mine, state)


def test_an_ordinary_state_dict_is_loaded_before_and_after_the_first_call(case):
    other = Outer().double()
    wanted = other(case[1])
    folder = tempfile.mkdtemp()

    def rank(number: int) -> tuple[Tensor, Tensor]:
        early = sw.parallelize(
            copy.deepcopy(case[0]), compile={"parts": ["backbone"], "directory": folder}, plan="tp=2"
        )
        early.load_state_dict(other.state_dict())
        late = sw.parallelize(copy.deepcopy(case[0]), compile={"parts": ["backbone"], "directory": folder}, plan="tp=2")
        late(case[1])
        late.load_state_dict(other.state_dict())
        return early(case[1]).detach(), late(case[1]).detach()

    for result in run_ranks(2, rank):
        torch.testing.assert_close(result, (wanted.detach(), wanted.detach()), rtol=1e-10, atol=1e-10)


def test_what_can_not_be_a_part_is_refused(case):
    net = case[0]
    net.head = nn.Linear(8, 8)
    net.head.weight = net.backbone[0].norm.weight
    with pytest.raises(InputError) as caught:
        sw.parallelize(net, compile={"parts": ["backbone", "backbone.0", "spine"]}, plan="single", inputs="per_rank")
    for words in (
        "'spine' is no submodule",
        "backbone.0 is inside of backbone",
        "are tied",
        '"per_rank" makes no sense',
    ):
        assert words in str(caught.value)
    with pytest.raises(InputError, match="leave example out"):
        sw.parallelize(case[0], compile={"parts": ["backbone"]}, example=case[1])


def test_rows_that_replicas_would_rescale_differently_are_refused(case):
    net = case[0]
    net.table = nn.Embedding(4, 4, max_norm=1.0)
    with pytest.raises(InputError, match="table has max_norm and is in no part"):
        sw.parallelize(net, compile={"parts": ["backbone"]}, plan="single", inputs="per_replica")


def job(rank: int, state: dict[str, Tensor], x: Tensor, y: Tensor, folder: str) -> tuple[Steps, dict[str, Tensor]]:
    net = Outer().double()  # every process draws its own parameters
    if rank == 0:
        net.load_state_dict(state)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    options = {"plan": "dp=2", "inputs": "per_replica", "directory": folder}
    model, optimizer = sw.parallelize(net, optimizer, **grouped(parts=["backbone"], **options))
    mine = slice(4 * rank, 4 * rank + 4)
    return [step(model, optimizer, x[mine], y[mine]) for _ in range(3)], whole(model.state_dict())


def test_on_processes(case, pools, tmp_path):
    losses, state = expected(case)
    every = pools[2].run(job, case[0].state_dict(), *case[1:], str(tmp_path))
    for value, mine in every:
        assert_same(mine, state)
        torch.testing.assert_close([norm for _, norm in value], [norm for _, norm in losses], rtol=1e-10, atol=1e-10)
