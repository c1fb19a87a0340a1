"""nanoGPT's and minGPT's scripts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.errors import InputError

from .gpt import GPT, GPTConfig, batches
from .running import PLANS, OneLine, check, check_refused, parameters, seeded, whole, written


def nanogpt(one_line: OneLine, checkpoint: dict[str, Any] | None = None, steps: int = 4) -> list[Tensor]:
    """Accumulation, a rate set by hand, clipping, a scaler that does nothing, evaluation, saving and going on."""
    model = seeded(lambda: GPT(GPTConfig(block_size=12)).double())
    model.crop_block_size(8)
    if checkpoint is not None:
        state = checkpoint["model"]
        for key in [key for key in state if key.startswith("_orig_mod.")]:
            state[key.removeprefix("_orig_mod.")] = state.pop(key)
        model.load_state_dict(state)
    optimizer = model.configure_optimizers(0.1, 1e-2, (0.9, 0.95))
    if checkpoint is not None:
        optimizer.load_state_dict(checkpoint["optimizer"])
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    model, optimizer = one_line(model, optimizer)

    @torch.no_grad()
    def estimate_loss() -> Tensor:
        out = []
        model.eval()
        for split in range(2):
            losses = torch.zeros(2, dtype=torch.float64)
            for k, (x, y) in enumerate(batches(2, seed=100 + split)):
                with nullcontext():
                    _, loss = model(x, y)
                losses[k] = loss.item()
            out.append(losses.mean())
        model.train()
        return torch.stack(out)

    raw_model = model.module if hasattr(model, "module") else model
    seen = [torch.tensor(raw_model.estimate_mfu(8, 1.0))]
    first = 0 if checkpoint is None else checkpoint["iter_num"]
    micro = iter(batches(2 * steps)[2 * first :])
    for step in range(first, steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (step + 1) / 3
        if step % 2 == 0:
            seen.append(estimate_loss())
        for micro_step in range(2):
            model.require_backward_grad_sync = micro_step == 1
            x, y = next(micro)
            _, loss = model(x, y)
            loss = loss / 2
            seen.append(loss.detach().clone())
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    return seen + parameters(raw_model)


@pytest.mark.parametrize("plan", PLANS)
def test_nanogpt(plan: str) -> None:
    check(nanogpt, plan)


@pytest.fixture(scope="module")
def halfway() -> dict[str, Any]:
    """A checkpoint of nanoGPT's, saved on one device after two steps, of a compiled model."""
    kept: dict[str, Any] = {}

    def keeping(model: Any, optimizer: Any) -> Any:
        kept.update(model=model, optimizer=optimizer)
        return model, optimizer

    nanogpt(keeping, steps=2)
    state = {f"_orig_mod.{key}": value for key, value in kept["model"].state_dict().items()}
    return {"model": state, "optimizer": kept["optimizer"].state_dict(), "iter_num": 2}


@pytest.mark.parametrize("plan", PLANS)
def test_nanogpt_resumes(plan: str, halfway: dict[str, Any]) -> None:
    """The optimizer has its state when it is passed in; the rest of the run is that of one that was never stopped."""
    whole_run = nanogpt(lambda model, optimizer: (model, optimizer))
    resumed = nanogpt(lambda model, optimizer: (model, optimizer), written(halfway))
    for mine, theirs in zip(reversed(resumed[1:]), reversed(whole_run), strict=False):
        assert torch.equal(mine, theirs)
    check(lambda one_line: nanogpt(one_line, written(halfway)), plan)


class Trainer:
    """minGPT's: callbacks by name; the optimizer is made where the run begins."""

    def __init__(self, model: GPT, one_line: OneLine) -> None:
        self.model, self.one_line, self.iter_num = model, one_line, 0
        self.callbacks: dict[str, list[Callable[[Trainer], None]]] = defaultdict(list)

    def run(self) -> None:
        self.optimizer = self.model.configure_optimizers(0.1, 1e-2, (0.9, 0.95))
        self.model, self.optimizer = self.one_line(self.model, self.optimizer)
        self.model.train()
        for x, y in batches(3):
            _, self.loss = self.model(x, y)
            self.model.zero_grad(set_to_none=True)
            self.loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            for callback in self.callbacks["on_batch_end"]:
                callback(self)
            self.iter_num += 1


def mingpt(one_line: OneLine) -> list[Tensor]:
    """Its MLP is a closure; a callback generates in the middle of training, and saves."""
    trainer = Trainer(seeded(lambda: GPT(GPTConfig(), closure=True).double()), one_line)
    seen: list[Tensor] = []

    def batch_end_callback(trainer: Trainer) -> None:
        seen.append(trainer.loss.detach().clone())
        if trainer.iter_num == 1:
            trainer.model.eval()
            with torch.no_grad():
                seen.append(trainer.model.generate(torch.tensor([[1, 2, 3], [4, 5, 6]]), 2, temperature=0.8, top_k=5))
            seen.extend(value for _, value in sorted(written(whole(trainer.model)).items()))
            trainer.model.train()

    trainer.callbacks["on_batch_end"].append(batch_end_callback)
    trainer.run()
    return seen + parameters(trainer.model)


@pytest.mark.parametrize("plan", PLANS)
def test_mingpt(plan: str) -> None:
    check(mingpt, plan)


@pytest.mark.parametrize("plan", ["tp=2", "zero3=2", "pp=2"])
def test_a_part_of_the_model_is_not_saved_as_the_model(plan: str) -> None:
    def save(one_line: OneLine) -> list[Tensor]:
        model = one_line(seeded(lambda: GPT(GPTConfig()).double()), example=batches(1)[0])
        return list(written(model.module.state_dict()))

    check_refused(save, plan, InputError, "sw.save(path, model, optimizer)", "model.full_state_dict(rank=0)")
