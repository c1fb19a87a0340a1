"""nanoGPT's script as torchrun starts it: seeds and batches of each rank, `.module`, evaluation, saving, going on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardwright as sw
from shardwright.errors import DriftError, InputError
from tests.training_code.gpt import GPT, GPTConfig

STEPS, HALF = 4, 2


def get_batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    text = torch.randint(24, (2, 9), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def train(rank: int, plan: str, folder: str, resume: bool) -> list[torch.Tensor]:
    """Two of four steps, and a checkpoint; or the rest of them."""
    master_process, out = rank == 0, Path(folder)
    torch.manual_seed(1337 + rank)  # so that ranks begin with different weights
    data, held_out = torch.Generator().manual_seed(rank), torch.Generator().manual_seed(50 + rank)
    model = GPT(GPTConfig()).double()
    optimizer = model.configure_optimizers(0.1, 1e-2, (0.9, 0.95))
    plain = out / "ckpt.pt"
    if resume and plain.exists():
        checkpoint = torch.load(plain, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    x, y = get_batch(data)
    model, optimizer = sw.parallelize(
        model, optimizer, plan=plan, inputs="per_rank", example=(x, y), compile={"directory": out / "generated"}
    )
    if resume and not plain.exists():
        assert sw.load(out / "ckpt", model, optimizer).step == HALF
    raw_model = model.module
    seen = []
    for step in range(STEPS):
        if step == HALF and not resume:
            break
        if step % 2 == 0:
            raw_model.eval()
            with torch.no_grad():
                evaluated = torch.stack([raw_model(*get_batch(held_out))[1] for _ in range(2)]).mean()
            raw_model.train()
        batches = [(x, y), get_batch(data)]
        x, y = get_batch(data)
        if resume and step < HALF:
            continue  # as if the data were read from where it was left
        if step % 2 == 0:
            seen.append(evaluated)
        for micro_step, batch in enumerate(batches):
            model.require_backward_grad_sync = micro_step == 1
            _, loss = model(*batch)
            (loss / 2).backward()
            seen.append(loss.detach().clone())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if not resume and plan == "dp=2" and master_process:
        torch.save({"model": raw_model.state_dict(), "optimizer": optimizer.state_dict()}, plain)
    elif not resume and plan != "dp=2":
        sw.save(out / "ckpt", model, optimizer, step=HALF)
    state = model.full_state_dict()
    return [*seen, *(state[key] for key in sorted(state))]


def on_one_device(resume: bool) -> list[torch.Tensor]:
    """The same with the batches of both ranks in one, and the weights of rank 0; `resume`: what comes after a half."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1337)
        model = GPT(GPTConfig()).double()
    optimizer = model.configure_optimizers(0.1, 1e-2, (0.9, 0.95))
    data = [torch.Generator().manual_seed(rank) for rank in range(2)]
    held_out = [torch.Generator().manual_seed(50 + rank) for rank in range(2)]

    def whole(generators: list[torch.Generator]) -> list[torch.Tensor]:
        return [torch.cat(parts) for parts in zip(*map(get_batch, generators), strict=True)]

    seen: list[torch.Tensor] = []
    for step in range(STEPS if resume else HALF):
        seen = [] if resume and step == HALF else seen
        if step % 2 == 0:
            with torch.no_grad():
                seen.append(torch.stack([model(*whole(held_out))[1] for _ in range(2)]).mean())
        for _ in range(2):
            _, loss = model(*whole(data))
            (loss / 2).backward()
            seen.append(loss.detach().clone())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    state = model.state_dict()
    return [*seen, *(state[key] for key in sorted(state))]


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero3=2", "pp=2", "auto"])
def test_the_script_runs_stops_and_goes_on(pools, tmp_path, plan):
    for resume in (False, True):
        expected = on_one_device(resume)
        for values in pools[2].run(train, plan, str(tmp_path), resume):
            for mine, theirs in zip(values, expected, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)


def evaluate_on_rank_0(rank: int, folder: str) -> str:
    """What nanoGPT does with DDP, whose forward waits for nobody."""
    torch.manual_seed(0)
    x, y = get_batch(torch.Generator().manual_seed(rank))
    model = sw.parallelize(
        GPT(GPTConfig()).double(), plan="dp=2", inputs="per_rank", compile={"directory": Path(folder)}
    )
    try:
        if rank == 0:
            with torch.no_grad():
                model.module.eval()(x, y)
        model.train()(x, y)[1].backward()
    except (DriftError, InputError) as error:
        return str(error)
    return ""


def test_an_evaluation_on_rank_0_alone_is_named_on_all_ranks(pools, tmp_path):
    for text in pools[2].run(evaluate_on_rank_0, str(tmp_path)):
        assert "call: eval on rank 0, train on rank 1" in text
        assert "an evaluation on rank 0 alone waits for the others: run it on all ranks and print on one" in text
