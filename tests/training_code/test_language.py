"""Language models: nanoGPT's and minGPT's scripts, PyTorch's word model and translation, LoRA, Whisper."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .running import OneLine, check, parameters, seeded

PLANS = ["dp=2", "tp=2", "zero3=2", "pp=2", "auto"]


@dataclass
class GPTConfig:
    block_size: int = 8
    vocab_size: int = 24
    n_layer: int = 2
    n_head: int = 2
    n_embd: int = 16
    dropout: float = 0.0
    bias: bool = True


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.n_head, self.n_embd, self.dropout = config.n_head, config.n_embd, config.dropout

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = (
            part.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
            for part in self.c_attn(x).split(self.n_embd, dim=2)
        )
        dropout = self.dropout if self.training else 0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=dropout, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    """minGPT's block: its MLP is a ModuleDict that a lambda runs through."""

    def __init__(self, config: GPTConfig, closure: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.mlp = nn.ModuleDict(
            {
                "c_fc": nn.Linear(config.n_embd, 4 * config.n_embd),
                "act": nn.GELU(),
                "c_proj": nn.Linear(4 * config.n_embd, config.n_embd),
            }
        )
        m = self.mlp
        if closure:
            self.mlpf = lambda x: m.c_proj(m.act(m.c_fc(x)))
        self.closure = closure

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        y = self.ln_2(x)
        if self.closure:
            return x + self.mlpf(y)
        return x + self.mlp["c_proj"](self.mlp["act"](self.mlp["c_fc"](y)))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig, closure: bool = False) -> None:
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "drop": nn.Dropout(config.dropout),
                "h": nn.ModuleList(Block(config, closure) for _ in range(config.n_layer)),
                "ln_f": nn.LayerNorm(config.n_embd),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(p, mean=0.0, std=0.02 / math.sqrt(2 * config.n_layer))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, mean=0.0, std=0.2)

    def get_num_params(self) -> int:
        return sum(p.numel() for p in self.parameters()) - self.transformer.wpe.weight.numel()

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)

    def configure_optimizers(self, weight_decay: float, learning_rate: float, betas: tuple[float, float]):
        params = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        fused = "fused" in inspect.signature(torch.optim.AdamW).parameters
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, **({"fused": False} if fused else {}))


def batches(count: int, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    text = [torch.randint(24, (4, 9), generator=generator) for _ in range(count)]
    return [(window[:, :-1].contiguous(), window[:, 1:].contiguous()) for window in text]


def nanogpt(one_line: OneLine) -> list[Tensor]:
    """Gradient accumulation, a learning rate set by hand, clipping, evaluation in between."""
    model = seeded(lambda: GPT(GPTConfig()).double())
    optimizer = model.configure_optimizers(0.1, 1e-2, (0.9, 0.95))
    x, y = batches(1)[0]
    model, optimizer = one_line(model, optimizer, example=(x, y))
    seen: list[Tensor] = []
    micro = iter(batches(6))
    for step in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (step + 1) / 3
        if step == 1:
            model.eval()
            with torch.no_grad():
                seen += [model(x, y)[1].clone()]
            model.train()
        for _ in range(2):
            x, y = next(micro)
            _, loss = model(x, y)
            loss = loss / 2
            seen.append(loss.detach().clone())
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return seen + parameters(model)


@pytest.mark.parametrize("plan", PLANS)
def test_nanogpt(plan: str) -> None:
    check(nanogpt, plan)


def mingpt(one_line: OneLine) -> list[Tensor]:
    """The model is compiled at its first call, and its MLP is a closure."""
    model = seeded(lambda: GPT(GPTConfig(), closure=True).double())
    optimizer = model.configure_optimizers(0.1, 1e-2, (0.9, 0.95))
    model, optimizer = one_line(model, optimizer)
    model.train()
    seen: list[Tensor] = []
    for x, y in batches(3):
        _, loss = model(x, y)
        seen.append(loss.detach().clone())
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return seen + parameters(model)


@pytest.mark.parametrize("plan", PLANS)
def test_mingpt(plan: str) -> None:
    check(mingpt, plan)


class RNNModel(nn.Module):
    """PyTorch's word language model: hidden states go in and out, weights are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.encoder = nn.Dropout(0.0), nn.Embedding(20, 12)
        self.rnn = nn.LSTM(12, 12, 2, dropout=0.0)
        self.decoder = nn.Linear(12, 20)
        self.decoder.weight = self.encoder.weight

    def forward(self, text: Tensor, hidden: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        output, hidden = self.rnn(self.drop(self.encoder(text)), hidden)
        return F.log_softmax(self.decoder(self.drop(output)).view(-1, 20), dim=1), hidden


def word_language_model(one_line: OneLine) -> list[Tensor]:
    """Truncated backpropagation through time, and plain SGD written by hand."""
    model = one_line(seeded(lambda: RNNModel().double()))
    generator = torch.Generator().manual_seed(2)
    hidden = (torch.zeros(2, 4, 12, dtype=torch.float64), torch.zeros(2, 4, 12, dtype=torch.float64))
    seen: list[Tensor] = []
    for _ in range(3):
        window = torch.randint(20, (6, 4), generator=generator)
        model.zero_grad()
        hidden = tuple(held.detach() for held in hidden)
        output, hidden = model(window[:-1], hidden)
        loss = F.nll_loss(output, window[1:].reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad, alpha=-0.5)
        seen.append(loss.detach().clone())
    return seen + parameters(model)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_word_language_model(plan: str) -> None:
    check(word_language_model, plan)


class Seq2Seq(nn.Module):
    """PyTorch's translation example: nn.Transformer with masks and padding masks made by the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)
        self.source, self.target = nn.Embedding(20, 16), nn.Embedding(20, 16)
        self.generator = nn.Linear(16, 20)

    def forward(self, source: Tensor, target: Tensor, mask: Tensor, source_padding: Tensor, target_padding: Tensor):
        outs = self.transformer(
            self.source(source) * 4.0, self.target(target) * 4.0, None, mask, None, source_padding, target_padding,
            source_padding,
        )  # fmt: skip
        return self.generator(outs)


def language_translation(one_line: OneLine) -> list[Tensor]:
    model = seeded(lambda: Seq2Seq().double())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.9, 0.98), eps=1e-9)
    model, optimizer = one_line(model, optimizer)
    generator, loss_fn = torch.Generator().manual_seed(3), nn.CrossEntropyLoss(ignore_index=1)
    seen: list[Tensor] = []
    for _ in range(2):
        source, target = (torch.randint(2, 20, (4, 7), generator=generator) for _ in range(2))
        source[0, 5:], target[1, 4:] = 1, 1
        mask = torch.triu(torch.ones(6, 6, dtype=torch.bool), diagonal=1)
        logits = model(source, target[:, :-1], mask, source == 1, target[:, :-1] == 1)
        optimizer.zero_grad()
        loss = loss_fn(logits.reshape(-1, 20), target[:, 1:].reshape(-1))
        loss.backward()
        optimizer.step()
        seen.append(loss.detach().clone())
    return seen + parameters(model)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero3=2"])
def test_language_translation(plan: str) -> None:
    check(language_translation, plan)


class LoRALinear(nn.Module):
    """A frozen layer and a small trained one beside it, as litgpt has it."""

    def __init__(self, width: int, out: int, r: int = 2) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out)
        self.lora_A, self.lora_B = nn.Parameter(torch.randn(r, width)), nn.Parameter(torch.randn(out, r) * 0.1)
        self.scaling = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + (x @ self.lora_A.T @ self.lora_B.T) * self.scaling


def lora(one_line: OneLine) -> list[Tensor]:
    def make() -> nn.Module:
        model = GPT(GPTConfig()).double()
        for block in model.transformer.h:
            block.attn.c_attn = LoRALinear(16, 48).double()
        for name, p in model.named_parameters():
            p.requires_grad = "lora_" in name
        return model

    model = seeded(make)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer = one_line(model, optimizer)
    seen: list[Tensor] = []
    for x, y in batches(3, seed=4):
        _, loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach().clone())
    return seen + parameters(model)


@pytest.mark.parametrize("plan", PLANS)
def test_lora(plan: str) -> None:
    check(lora, plan)


def whisper(one_line: OneLine) -> list[Tensor]:
    """An encoder and a decoder of Hugging Face's, called with keywords."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=32, num_mel_bins=8, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_source_positions=8,
        max_target_positions=8, dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        use_cache=False,
    )  # fmt: skip
    model = seeded(lambda: WhisperForConditionalGeneration(config).double().train())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = one_line(model, optimizer)
    generator = torch.Generator().manual_seed(5)
    seen: list[Tensor] = []
    for _ in range(2):
        features = torch.randn(4, 8, 16, generator=generator, dtype=torch.float64)
        labels = torch.randint(3, 32, (4, 6), generator=generator)
        loss = model(input_features=features, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach().clone())
    return seen + parameters(model)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero3=2"])
def test_whisper(plan: str) -> None:
    check(whisper, plan)
