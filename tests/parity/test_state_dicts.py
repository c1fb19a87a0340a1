"""State dicts in the user's own hands: what one rank writes is the whole model, or it is refused."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from shardwright.errors import InputError
from shardwright.parallelize import parallelize
from shardwright.runtime.model.parallel_model import ParallelModel
from tests.options import grouped
from tests.parity.threaded import world_of
from tests.runtime.ranks import run_ranks


class Net(nn.Module):
    """Two layers, a frozen one, tied weights and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.fixed = nn.Embedding(8, 4), nn.Linear(4, 8), nn.Linear(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(4)
        self.fixed.requires_grad_(False)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.head(self.norm(self.fixed(self.up(self.embed(x)).relu()))), y)


with torch.random.fork_rng():
    torch.manual_seed(0)
    FRESH = Net().double()  # drawn once: ranks that are threads share a generator


def net() -> Net:
    return copy.deepcopy(FRESH)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]  # a frozen one too
    return torch.optim.AdamW([{"params": vectors, "weight_decay": 0.0}, {"params": matrices}], lr=0.05)


X, Y = torch.arange(8), torch.arange(8).flip(0)


def train(model, optimizer, steps: int = 2) -> float:
    for _ in range(steps):
        loss = model(X, Y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def reference(steps: int):
    model = net()
    optimizer = adam(model)
    return train(model, optimizer, steps), model, optimizer


def compiled(plan: str, folder, model: nn.Module | None = None):
    model = model or net()
    batches = {"microbatches": 1} if plan.startswith("pp") else {}
    return parallelize(model, adam(model), plan=plan, example=(X, Y), **grouped(directory=folder, **batches))


def written(value) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def read(data: bytes):
    return torch.load(io.BytesIO(data), weights_only=True)


def close(mine, theirs) -> None:
    assert mine.keys() == theirs.keys()
    for key, value in theirs.items():
        torch.testing.assert_close(mine[key], value, rtol=0, atol=1e-10)


@pytest.mark.parametrize("plan", ["single", "dp=2"])
def test_what_is_whole_everywhere_is_saved_and_goes_on_on_one_device(tmp_path, plan):
    """And in it are plain tensors under the original keys, numbered as torch does."""
    wanted, trained, _ = reference(4)

    def run(rank):
        model, optimizer = compiled(plan, tmp_path)
        train(model, optimizer)
        return written({"model": model.state_dict(), "optimizer": optimizer.state_dict()})

    for data in run_ranks(world_of(plan), run):
        saved = read(data)
        assert {type(value) for value in saved["model"].values()} == {torch.Tensor}
        model = net()
        optimizer = adam(model)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        assert train(model, optimizer) == pytest.approx(wanted, abs=1e-10)
        close(model.state_dict(), trained.state_dict())


def test_what_is_whole_everywhere_may_be_written_as_safetensors(tmp_path):
    def run(rank):
        model, _ = compiled("dp=2", tmp_path)
        values = {key: value for key, value in model.state_dict().items() if key != "head.weight"}  # tied: as on one
        return safetensors.torch.load(safetensors.torch.save(values))

    first, second = run_ranks(2, run)
    expected = {key: value for key, value in net().state_dict().items() if key != "head.weight"}
    close(first, expected)
    close(second, expected)


WRITERS = {
    "torch.save": written,
    "inside of another dict": lambda values: written({"epoch": 3, "model": values}),
    "moved to the CPU": lambda values: written({key: value.cpu() for key, value in values.items()}),
    "cloned": lambda values: written({key: value.clone() for key, value in values.items()}),
    "pickle": pickle.dumps,
    "safetensors": lambda values: safetensors.torch.save(dict(values)),
}


@pytest.mark.parametrize("plan", ["tp=2", "zero3=2", "pp=2"])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_rank_does_not_write_its_part_as_if_it_were_the_model(tmp_path, plan, writer):
    def run(rank):
        model, _ = compiled(plan, tmp_path)
        with pytest.raises(InputError) as caught:
            WRITERS[writer](model.state_dict())
        return str(caught.value)

    for text in run_ranks(2, run):
        assert "sw.save(" in text
        assert "full_state_dict(rank=0)" in text


@pytest.mark.parametrize("plan", ["tp=2", "zero3=2", "pp=2"])
def test_parameters_are_no_way_around(tmp_path, plan):
    def run(rank):
        model, optimizer = compiled(plan, tmp_path)
        for value in (dict(model.named_parameters()), optimizer):
            with pytest.raises(InputError, match=r"sw\.save\("):
                written(value)

    run_ranks(2, run)


@pytest.mark.parametrize("plan", ["tp=2", "zero1=2", "zero2=2", "zero3=2", "pp=2"])
def test_a_rank_does_not_write_its_part_of_the_optimizer_s_state(tmp_path, plan):
    def run(rank):
        model, optimizer = compiled(plan, tmp_path)
        if plan != "pp=2":  # threads can't send and receive
            train(model, optimizer)
        with pytest.raises(InputError, match=r"sw\.save\("):
            written({"optimizer": optimizer.state_dict()})

    run_ranks(2, run)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero1=2", "zero2=2", "zero3=2"])
def test_a_plain_checkpoint_goes_on_under_any_plan(tmp_path, plan):
    wanted, trained, _ = reference(4)
    _, model, optimizer = reference(2)
    saved = written({"model": model.state_dict(), "optimizer": optimizer.state_dict()})

    def run(rank):
        model, optimizer = compiled(plan, tmp_path)
        values = read(saved)
        model.load_state_dict(values["model"])
        optimizer.load_state_dict(values["optimizer"])
        return train(model, optimizer), model.full_state_dict()

    for loss, values in run_ranks(2, run):
        assert loss == pytest.approx(wanted, abs=1e-10)
        close(values, trained.state_dict())


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero1=2"])
@pytest.mark.parametrize("early", [True, False])
def test_a_plain_checkpoint_may_be_loaded_before_anything_is_compiled(tmp_path, plan, early):
    """Into the original, or into a model that is compiled at its first call."""
    wanted, trained, _ = reference(4)
    _, before, optimizer_before = reference(2)

    def run(rank):
        model = net()
        optimizer = adam(model)
        if not early:
            model, optimizer = parallelize(model, optimizer, plan=plan, compile={"directory": tmp_path})
        model.load_state_dict(copy.deepcopy(before.state_dict()))
        optimizer.load_state_dict(copy.deepcopy(optimizer_before.state_dict()))
        if early:
            model, optimizer = parallelize(model, optimizer, plan=plan, compile={"directory": tmp_path})
        return train(model, optimizer), model.full_state_dict()

    for loss, values in run_ranks(2, run):
        assert loss == pytest.approx(wanted, abs=1e-10)
        close(values, trained.state_dict())


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero1=2", "zero3=2"])
def test_the_best_so_far_is_kept_in_memory(tmp_path, plan):
    """`copy.deepcopy` of both state dicts, and back."""
    wanted, trained, _ = reference(4)

    def run(rank):
        model, optimizer = compiled(plan, tmp_path)
        train(model, optimizer)
        kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(model, optimizer, 3)
        model.load_state_dict(kept[0])
        optimizer.load_state_dict(kept[1])
        return train(model, optimizer), model.full_state_dict()

    for loss, values in run_ranks(2, run):
        assert loss == pytest.approx(wanted, abs=1e-10)
        close(values, trained.state_dict())


def test_a_state_dict_of_another_optimizer_is_refused(tmp_path):
    def run(rank):
        _, optimizer = compiled("tp=2", tmp_path)
        other = torch.optim.AdamW(net().parameters()).state_dict()
        with pytest.raises(InputError, match=r"param groups of \[\d+\] parameters, and the optimizer was made with \["):
            optimizer.load_state_dict(other)

    run_ranks(2, run)


def test_the_state_of_a_group_that_was_added_later(tmp_path):
    def run(rank):
        model, optimizer = compiled("dp=2", tmp_path)
        extra = nn.Parameter(torch.ones(3, dtype=torch.double))
        optimizer.add_param_group({"params": [extra]})
        extra.grad = torch.ones_like(extra)
        train(model, optimizer, 1)
        saved = read(written(optimizer.state_dict()))
        assert torch.equal(
            saved["state"][saved["param_groups"][2]["params"][0]]["exp_avg"], optimizer.state[extra]["exp_avg"]
        )
        optimizer.load_state_dict(saved)

    run_ranks(2, run)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero3=2"])
def test_torch_distributed_checkpoint_writes_and_reads_state_dicts(tmp_path, plan):
    wanted = reference(2)[1].state_dict()

    def run(rank):
        model, optimizer = compiled(plan, tmp_path / "generated")
        train(model, optimizer)
        dcp.save(model.state_dict(), checkpoint_id=tmp_path / "saved")
        other, _ = compiled(plan, tmp_path / "generated")
        values = other.state_dict()
        dcp.load(values, checkpoint_id=tmp_path / "saved")
        other.load_state_dict(values)
        assert isinstance(other, ParallelModel)
        return other.full_state_dict()

    for values in run_ranks(2, run):
        close(values, wanted)


def resumed(rank, folder, saved):
    """On processes: threads can't send and receive."""
    model, optimizer = compiled("pp=2", folder)
    values = read(saved)
    model.load_state_dict(values["model"])
    optimizer.load_state_dict(values["optimizer"])
    loss = train(model, optimizer)
    with pytest.raises(InputError, match=r"sw\.save\("):
        written(optimizer.state_dict())
    return loss, model.full_state_dict()


def test_a_plain_checkpoint_goes_on_in_a_pipeline(pools, tmp_path):
    wanted, trained, _ = reference(4)
    _, model, optimizer = reference(2)
    saved = written({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    for loss, values in pools[2].run(resumed, str(tmp_path), saved):
        assert loss == pytest.approx(wanted, abs=1e-10)
        close(values, trained.state_dict())


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
def test_keys_that_a_wrapper_left_are_named(tmp_path, prefix):
    model, _ = compiled("single", tmp_path)
    values = {prefix + key: value for key, value in net().state_dict().items()}
    with pytest.raises(InputError, match=rf"take it off: key\.removeprefix\('{prefix}'\)"):
        model.load_state_dict(values)
