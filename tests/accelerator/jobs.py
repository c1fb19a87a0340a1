"""What ranks on stand-ins do: models built on the CPU, moved to the device, and trained as a user would.

Each job checks that what it got lies on the device, and returns CPU tensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

import shardwright as sw
from shardwright.runtime.world import here
from tests.models.transformer import Transformer, TransformerConfig

from .stand_in import KIND

WORDS, LENGTH = 32, 8


def gpt(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return Transformer(TransformerConfig(vocab=WORDS, seq=LENGTH, d=16, dropout=0.0)).to(dtype)


def experts() -> nn.Module:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, use_cache=False, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    model.set_experts_implementation("eager")
    return model.double()


def batch(number: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(WORDS, (4, LENGTH + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def own_device() -> torch.device:
    device = here().device
    assert device.type == KIND, device
    return device


# -- plans --------------------------------------------------------------------------------------


def check_plan(rank: int, plan: str, options: dict[str, Any]) -> tuple[bool, str]:
    """The compiled program on stand-ins against the original on one: loss, gradients, parameters after 3 steps."""
    device = own_device()
    model = (experts() if "ep" in plan else gpt()).to(device)
    ids, labels = (tensor.to(device) for tensor in batch())
    example = {"input_ids": ids, "labels": labels} if "ep" in plan else (ids, labels)
    report = sw.verify(model, plan, example=example, method="world", optimizer="adamw", **options)
    return report.passed, str(report)


# -- a training loop ----------------------------------------------------------------------------


def train(rank: int, plan: str, how: str, folder: str) -> list[float]:
    """Losses of a loop as users write it, saved after two steps by `plan`, and loaded by `plan` and by another one."""
    device, exact = own_device(), how == "exact"
    plain = gpt(torch.float64 if exact else torch.float32).to(device)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    precision = "bf16-mixed" if how == "bf16" else None
    model, optimizer = sw.parallelize(plain, optimizer, plan=plan, example=_moved(0, device), precision=precision)
    scaler = torch.amp.GradScaler(KIND, init_scale=8.0, enabled=how == "scaler")
    losses = [_step(model, optimizer, scaler, number, device) for number in range(2)]
    sw.save(Path(folder) / "saved", model, optimizer)
    return losses + [_step(model, optimizer, scaler, number, device) for number in range(2, 4)]


def resume(rank: int, plan: str, folder: str) -> list[float]:
    """The last two losses, from what another plan has saved."""
    device = own_device()
    plain = gpt().to(device)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    model, optimizer = sw.parallelize(plain, optimizer, plan=plan, example=_moved(0, device))
    torch.rand(3, device=device)  # the loaded state replaces that of the device's generator
    sw.load(Path(folder) / "saved", model, optimizer)
    scaler = torch.amp.GradScaler(KIND, enabled=False)
    return [_step(model, optimizer, scaler, number, device) for number in range(2, 4)]


def _step(model: nn.Module, optimizer: Any, scaler: Any, number: int, device: torch.device) -> float:
    loss = model(*_moved(number, device))
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    assert norm.device == loss.device == device
    assert {parameter.device for parameter in model.parameters()} == {device}
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return float(loss.detach())


def _moved(number: int, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(tensor.to(device) for tensor in batch(number))


def train_alone(rank: int, dtype: torch.dtype) -> list[float]:
    """The same loop without shardwright, on this rank's device: moving a model there unties its parameters."""
    device = own_device()
    model = gpt(dtype).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(KIND, enabled=False)
    return [_step(model, optimizer, scaler, number, device) for number in range(4)]
