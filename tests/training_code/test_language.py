"""PyTorch's word_language_model, recurrent and as a transformer, and its language_translation."""

from __future__ import annotations

import io
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.errors import InputError, LoweringError, PlanError

from .running import DOUBLE, PLANS, OneLine, check, check_refused, parameters, seeded, whole, written

WORDS = 20
ONE_MICROBATCH = {"pp=2": {"microbatches": 1}}


class RNNModel(nn.Module):
    """Hidden states go in and out and are made by the model; weights are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.nhid, self.nlayers = 12, 2
        self.drop, self.encoder = nn.Dropout(0.0), nn.Embedding(WORDS, 12)
        self.rnn = nn.LSTM(12, self.nhid, self.nlayers, dropout=0.0)
        self.decoder = nn.Linear(self.nhid, WORDS)
        self.decoder.weight = self.encoder.weight
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, text: Tensor, hidden: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        output, hidden = self.rnn(self.drop(self.encoder(text)), hidden)
        return F.log_softmax(self.decoder(self.drop(output)).view(-1, WORDS), dim=1), hidden

    def init_hidden(self, bsz: int) -> tuple[Tensor, Tensor]:
        weight = next(self.parameters())
        shape = (self.nlayers, bsz, self.nhid)
        return weight.new_zeros(shape), weight.new_zeros(shape)


def corpus(columns: int, seed: int) -> Tensor:
    """Words in columns: the batch is dim 1."""
    return torch.randint(WORDS, (13, columns), generator=torch.Generator().manual_seed(seed))


def get_batch(source: Tensor, i: int, bptt: int = 5) -> tuple[Tensor, Tensor]:
    length = min(bptt, len(source) - 1 - i)
    return source[i : i + length], source[i + 1 : i + 1 + length].view(-1)


def repackage_hidden(hidden: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(value.detach() for value in hidden)


def word_language_model(one_line: OneLine) -> list[Tensor]:
    """Truncated backpropagation through time, SGD by hand, a rate that falls with the validation, the best kept."""
    model = one_line(seeded(lambda: RNNModel().double()))
    criterion, train, validation, lr = nn.NLLLoss(), corpus(4, 2), corpus(2, 3), 2.0
    best, kept, seen = None, {}, []
    for _ in range(2):
        model.train()
        hidden = model.init_hidden(4)
        for i in range(0, len(train) - 1, 5):
            data, targets = get_batch(train, i)
            model.zero_grad()
            hidden = repackage_hidden(hidden)
            output, hidden = model(data, hidden)
            loss = criterion(output, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            for p in model.parameters():
                p.data.add_(p.grad, alpha=-lr)
            seen.append(loss.detach().clone())
        model.eval()
        total, hidden = 0.0, model.init_hidden(2)
        with torch.no_grad():
            for i in range(0, len(validation) - 1, 5):
                data, targets = get_batch(validation, i)
                output, hidden = model(data, hidden)
                hidden = repackage_hidden(hidden)
                total += len(data) * criterion(output, targets).item()
        seen.append(torch.tensor(total, dtype=DOUBLE))
        if best is None or total < best:
            best, kept = total, written(whole(model))
        else:
            lr /= 4.0
    model.load_state_dict(kept)
    return seen + parameters(model)


@pytest.mark.parametrize("plan", PLANS)
def test_word_language_model(plan: str) -> None:
    if plan == "pp=2":  # dim 0 is time
        check_refused(word_language_model, plan, LoweringError, "can't be cut into microbatches", "microbatches=1")
    check(word_language_model, plan, **ONE_MICROBATCH.get(plan, {}))


@pytest.mark.parametrize("plan", ["dp=2", "pp=2"])
def test_the_model_itself_is_not_pickled(plan: str) -> None:
    """The example writes the module to its file, and reads that back."""

    def save(one_line: OneLine) -> list[Tensor]:
        model = one_line(seeded(lambda: RNNModel().double()))
        model(corpus(4, 2), model.init_hidden(4))
        torch.save(model, io.BytesIO())
        return []

    check_refused(save, plan, InputError, "can't be pickled", "sw.save(path, model, optimizer)")


class PositionalEncoding(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        angles = torch.arange(32).unsqueeze(1) * torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        self.dropout = nn.Dropout(0.0)
        self.register_buffer("pe", torch.stack([angles.sin(), angles.cos()], -1).view(32, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x + self.pe[: x.size(0), :])


class TransformerModel(nn.Transformer):
    """A transformer whose decoder is a linear layer, with a mask that it makes once and keeps."""

    def __init__(self) -> None:
        super().__init__(d_model=16, nhead=2, dim_feedforward=32, num_encoder_layers=2, dropout=0.0)
        self.src_mask: Tensor | None = None
        self.pos_encoder, self.input_emb = PositionalEncoding(16), nn.Embedding(WORDS, 16)
        self.decoder = nn.Linear(16, WORDS)

    def _generate_square_subsequent_mask(self, size: int) -> Tensor:
        return torch.log(torch.tril(torch.ones(size, size)))

    def forward(self, src: Tensor, has_mask: bool = True) -> Tensor:
        if not has_mask:
            self.src_mask = None
        elif self.src_mask is None or self.src_mask.size(0) != len(src):
            self.src_mask = self._generate_square_subsequent_mask(len(src)).to(self.decoder.weight.dtype)
        src = self.pos_encoder(self.input_emb(src) * math.sqrt(16))
        return F.log_softmax(self.decoder(self.encoder(src, mask=self.src_mask)), dim=-1)


def word_transformer(one_line: OneLine, bptt: int = 4) -> list[Tensor]:
    model = one_line(seeded(lambda: TransformerModel().double()))
    criterion, train, seen = nn.NLLLoss(), corpus(4, 4), []
    for i in range(0, len(train) - 1, bptt):
        data, targets = get_batch(train, i, bptt)
        model.zero_grad()
        loss = criterion(model(data).view(-1, WORDS), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-0.5)
        seen.append(loss.detach().clone())
    model.eval()
    with torch.no_grad():
        seen.append(model(train[:4], has_mask=False).clone())
    return seen + parameters(model)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("plan", PLANS)
def test_the_word_language_model_as_a_transformer(plan: str) -> None:
    if plan == "pp=2":  # dim 0 is time
        check_refused(word_transformer, plan, LoweringError, "can't be cut into microbatches", "microbatches=1")
    check(word_transformer, plan, **ONE_MICROBATCH.get(plan, {}))


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_what_is_taken_for_the_batch_is_said() -> None:
    words = "a batch of 5 does not divide over 2", "the batch is dim 0 of the inputs"
    check_refused(lambda one_line: word_transformer(one_line, 5), "dp=2", PlanError, *words)


class Seq2Seq(nn.Module):
    """nn.Transformer with masks and padding masks that the loop makes; the batch is dim 1."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0)
        self.generator = nn.Linear(16, WORDS)
        self.source, self.target = nn.Embedding(WORDS, 16), nn.Embedding(WORDS, 16)
        self.positional_encoding = PositionalEncoding(16)

    def forward(
        self, src: Tensor, trg: Tensor, src_mask: Tensor, tgt_mask: Tensor, src_padding_mask: Tensor,
        tgt_padding_mask: Tensor, memory_key_padding_mask: Tensor,
    ) -> Tensor:  # fmt: skip
        src_emb = self.positional_encoding(self.source(src) * math.sqrt(16))
        tgt_emb = self.positional_encoding(self.target(trg) * math.sqrt(16))
        outs = self.transformer(
            src_emb, tgt_emb, src_mask, tgt_mask, None, src_padding_mask, tgt_padding_mask, memory_key_padding_mask
        )
        return self.generator(outs)

    def encode(self, src: Tensor, src_mask: Tensor) -> Tensor:
        return self.transformer.encoder(self.positional_encoding(self.source(src) * math.sqrt(16)), src_mask)

    def decode(self, tgt: Tensor, memory: Tensor, tgt_mask: Tensor) -> Tensor:
        tgt_emb = self.positional_encoding(self.target(tgt) * math.sqrt(16))
        return self.generator(self.transformer.decoder(tgt_emb, memory, tgt_mask))


def square(size: int) -> Tensor:
    return torch.triu(torch.ones(size, size, dtype=torch.bool), diagonal=1)


def translation(one_line: OneLine, greedy: bool = False, outside: bool = False) -> list[Tensor]:
    """Batches of two lengths; `greedy`: then a translation by `encode` and `decode`."""
    model = seeded(lambda: Seq2Seq().double())
    for p in model.parameters():
        if p.dim() > 1:
            seeded(lambda p=p: nn.init.xavier_uniform_(p))
    # eps: Adam multiplies the rounding of a gradient that is 0 (the bias of keys) by lr / eps
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.9, 0.98), eps=1e-6)
    model, optimizer = one_line(model, optimizer)
    generator, loss_fn = torch.Generator().manual_seed(3), nn.CrossEntropyLoss(ignore_index=1)
    seen: list[Tensor] = []
    for length in (7,) if greedy else (7, 6):
        src, tgt = (torch.randint(2, WORDS, (length, 4), generator=generator) for _ in range(2))
        src[5:, 0], tgt[4:, 1] = 1, 1
        tgt_input, src_mask = tgt[:-1, :], torch.zeros((length, length), dtype=torch.bool)
        src_padding, tgt_padding = (src == 1).transpose(0, 1), (tgt_input == 1).transpose(0, 1)
        logits = model(src, tgt_input, src_mask, square(length - 1), src_padding, tgt_padding, src_padding)
        optimizer.zero_grad()
        loss = loss_fn(logits.reshape(-1, WORDS), tgt[1:, :].reshape(-1))
        loss.backward()
        optimizer.step()
        seen.append(loss.detach().clone())
    if greedy:
        model.eval()
        with torch.no_grad():
            memory = model.encode(src[:, :1], src_mask)
            ys = torch.full((1, 1), 2)
            for _ in range(2):
                prob = model.decode(ys, memory, square(ys.size(0)))
                if outside:
                    prob = model.generator(prob)
                ys = torch.cat([ys, prob[-1].argmax(-1, keepdim=True)], dim=0)
        seen += [ys, memory.clone()]
    return seen + parameters(model)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("plan", PLANS)
def test_language_translation(plan: str) -> None:
    check(translation, plan)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("plan", ["tp=2", "pp=2"])
def test_a_greedy_translation_after_training(plan: str) -> None:
    """Of `encode` a pipeline reads the parameters of the first stage only."""
    check(lambda one_line: translation(one_line, greedy=True), plan, **ONE_MICROBATCH.get(plan, {}))


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_a_part_is_not_called_from_outside() -> None:
    """The example's `model.generator(out)` has to be a method."""
    script = lambda one_line: translation(one_line, greedy=True, outside=True)  # noqa: E731
    check_refused(script, "tp=2", InputError, "generator", "method")
