"""Fine-tuning: litgpt's LoRA, and Whisper of transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .gpt import GPT, GPTConfig, batches
from .running import DOUBLE, PLANS, OneLine, check, noise, parameters, seeded, whole, written


class LoRALinear(nn.Module):
    """A frozen layer and a small trained one beside it."""

    def __init__(self, width: int, out: int, r: int = 2, alpha: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out)
        self.r, self.merged, self.scaling = r, False, alpha / r
        self.lora_dropout = nn.Dropout(dropout) if dropout > 0 else (lambda x: x)
        self.lora_A, self.lora_B = nn.Parameter(torch.empty(r, width)), nn.Parameter(torch.zeros(out, r))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        pretrained = self.linear(x)
        if self.r == 0 or self.merged:
            return pretrained
        lora = self.lora_dropout(x) @ self.lora_A.transpose(0, 1) @ self.lora_B.transpose(0, 1)
        return pretrained + lora * self.scaling


class LoRAQKVLinear(LoRALinear):
    """LoRA of queries and values alone: one small A for both, a grouped convolution, zeros where keys are."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 3 * width)
        self.lora_A, self.lora_B = nn.Parameter(torch.empty(4, width)), nn.Parameter(torch.empty(2 * width, 2))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        nn.init.normal_(self.lora_B, std=0.1)
        rows = torch.arange(3 * width)
        self.register_buffer("lora_ind", rows[(rows < width) | (rows >= 2 * width)], persistent=False)

    def zero_pad(self, x: Tensor) -> Tensor:
        result = x.new_zeros(*x.shape[:-1], self.linear.out_features)
        return result.index_copy(x.dim() - 1, self.lora_ind, x)

    def forward(self, x: Tensor) -> Tensor:
        pretrained = self.linear(x)
        after_A = F.linear(self.lora_dropout(x), self.lora_A)
        after_B = F.conv1d(after_A.transpose(-2, -1), self.lora_B.unsqueeze(-1), groups=2).transpose(-2, -1)
        return pretrained + self.zero_pad(after_B) * self.scaling


def mark_only_lora_as_trainable(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        p.requires_grad = "lora_" in name


def chunked_cross_entropy(logits: Tensor, targets: Tensor, chunk_size: int) -> Tensor:
    parts = zip(logits.split(chunk_size, dim=1), targets.split(chunk_size, dim=1), strict=True)
    losses = [F.cross_entropy(part.reshape(-1, part.size(-1)), y.reshape(-1), reduction="none") for part, y in parts]
    return torch.cat(losses).mean()


class Headed(GPT):
    """litgpt's model gives back logits, and the loop has the loss."""

    def forward(self, idx: Tensor) -> Tensor:  # type: ignore[override]
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x))


def lora(one_line: OneLine) -> list[Tensor]:
    """Most is frozen; accumulation, a schedule with warm-up, validation, and what LoRA has trained alone is saved."""

    def make() -> nn.Module:
        model = Headed(GPTConfig()).double()
        for block in model.transformer.h:
            block.attn.c_attn = LoRAQKVLinear(16).double()
            block.attn.c_proj = LoRALinear(16, 16).double()
        mark_only_lora_as_trainable(model)
        return model

    model = seeded(make)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer = one_line(model, optimizer)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 2)
    annealing = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, annealing], [2])
    seen: list[Tensor] = []
    for iter_num, (x, y) in enumerate(batches(6, seed=4), 1):
        is_accumulating = iter_num % 2 != 0
        loss = chunked_cross_entropy(model(x)[..., :-1, :], y[..., :-1], chunk_size=4)
        (loss / 2).backward()
        seen.append(loss.detach().clone())
        if not is_accumulating:
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        if iter_num == 4:
            model.eval()
            with torch.no_grad():
                seen.append(chunked_cross_entropy(model(x), y, chunk_size=8).clone())
            model.train()
    saved = written({key: value for key, value in whole(model).items() if "lora_" in key})
    assert len(saved) == 8
    return seen + parameters(model)


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("plan", PLANS)
def test_lora(plan: str) -> None:
    check(lora, plan)


def whisper(one_line: OneLine) -> list[Tensor]:
    """Called with keywords; the encoder's positions are frozen, a linear schedule, evaluation by argmax."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration, get_linear_schedule_with_warmup

    config = WhisperConfig(
        vocab_size=32, num_mel_bins=8, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_source_positions=8,
        max_target_positions=8, dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        use_cache=False,
    )  # fmt: skip
    model = seeded(lambda: WhisperForConditionalGeneration(config).double().train())
    decayed = [p for name, p in model.named_parameters() if "norm" not in name and "bias" not in name]
    others = [p for name, p in model.named_parameters() if "norm" in name or "bias" in name]
    groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-6)
    model, optimizer = one_line(model, optimizer)
    schedule = get_linear_schedule_with_warmup(optimizer, 1, 4)
    generator = torch.Generator().manual_seed(5)
    seen: list[Tensor] = []
    for step in range(2):
        labels = torch.randint(3, 32, (4, 6), generator=generator)
        labels[0, 4:] = -100
        loss = model(input_features=noise(4, 8, 16, seed=step), labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        seen.append(loss.detach().clone())
    model.eval()
    with torch.no_grad():
        logits = model(input_features=noise(4, 8, 16, seed=9), labels=labels.clamp(min=0)).logits
    return [*seen, logits.argmax(-1), logits.to(DOUBLE), *parameters(model)]


@pytest.mark.parametrize("plan", PLANS)
def test_whisper(plan: str) -> None:
    check(whisper, plan)
