"""PyTorch's own transformer layers, with masks that are made in forward, cached, held or passed in."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.capture import capture
from shardwright.errors import CaptureError
from tests.parity.threaded import compare

VOCABULARY = 11


def subsequent(n: int) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(n)


def triangle(n: int) -> Tensor:
    return torch.triu(torch.ones(n, n) * float("-inf"), diagonal=1)


def logarithm(n: int) -> Tensor:
    return torch.log(torch.tril(torch.ones(n, n)))


def booleans(n: int) -> Tensor:
    return torch.triu(torch.ones(n, n, dtype=torch.bool), diagonal=1)


def filled(n: int) -> Tensor:
    mask = (torch.triu(torch.ones(n, n)) == 1).transpose(0, 1)
    return mask.float().masked_fill(mask == 0, float("-inf")).masked_fill(mask == 1, 0.0)


class LanguageModel(nn.Module):
    """Of the shape of PyTorch's tutorial: sequence first, a causal mask that the model makes, and may keep."""

    def __init__(self, make_mask: Callable[[int], Tensor], cached: bool = False, hint: bool | None = None) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.embedding, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)
        self.make_mask, self.cached, self.hint = make_mask, cached, hint
        self.mask: Tensor | None = None

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens.t()) * math.sqrt(8)
        mask = self.make_mask(len(x))
        mask = mask if mask.dtype is torch.bool else mask.to(x)
        if self.cached:
            if self.mask is None or self.mask.size(0) != len(x):
                self.mask = mask
            mask = self.mask
        y = self.head(self.encoder(x, mask, is_causal=self.hint))
        return F.cross_entropy(y.transpose(0, 1).reshape(-1, VOCABULARY), labels.reshape(-1))


def tokens() -> tuple[Tensor, Tensor]:
    return torch.randint(VOCABULARY, (4, 5)), torch.randint(VOCABULARY, (4, 5))


@pytest.mark.parametrize("make_mask", [subsequent, triangle, logarithm, booleans, filled])
def test_a_mask_that_the_model_makes(make_mask):
    torch.manual_seed(0)
    compare(LanguageModel(make_mask), tokens(), "dp=2")


@pytest.mark.parametrize("plan", ["tp=2", "zero3=2", "pp=2"])
@pytest.mark.parametrize("options", [{"cached": True}, {"hint": True}])
def test_a_mask_that_is_cached_and_one_with_a_hint(options, plan):
    torch.manual_seed(0)
    compare(LanguageModel(subsequent, **options), tokens(), plan)


def test_a_causal_mask_that_is_known_needs_no_mask():
    graph = capture(LanguageModel(subsequent), tokens()).graph
    attention = [op for op in graph.ops if "scaled_dot_product" in op.target]
    assert len(attention) == 2
    assert all(op.argument("is_causal") and op.argument("attn_mask") is None for op in attention)


class Encoder(nn.Module):
    """An encoder that is given its masks."""

    def __init__(self, **options: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, **options)
        self.register_buffer("causal", subsequent(5))
        self.attribute = subsequent(5).double()

    def forward(self, x: Tensor, padding: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        return self.encoder(x, mask, padding).square().mean()


class Buffered(Encoder):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, None, self.causal)


class AsAttribute(Encoder):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, None, self.attribute)


class Padded(Encoder):
    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return super().forward(x, padding, booleans(5))


def padded() -> tuple[Tensor, Tensor]:
    padding = torch.zeros(4, 5, dtype=torch.bool)
    padding[1, 3:] = True
    return torch.randn(4, 5, 8), padding


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero3=2"])
def test_masks_that_the_model_holds_or_is_given(plan):
    torch.manual_seed(0)
    compare(Buffered(), padded()[:1], plan)
    compare(AsAttribute(), padded()[:1], plan)
    compare(Padded(), padded(), plan)
    compare(Encoder(), padded(), plan)


class Passed(Encoder):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x, None, mask)


def test_a_mask_that_is_passed_in_is_used_as_it_is():
    torch.manual_seed(0)
    compare(Passed(), (torch.randn(4, 5, 8), subsequent(5)), "tp=2")


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = self.net.generate_square_subsequent_mask(target.shape[1]).to(target)
        return self.net(source, target, tgt_mask=mask).square().mean()


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_encoder_and_decoder(plan):
    torch.manual_seed(0)
    compare(Translator(), (torch.randn(4, 5, 8), torch.randn(4, 6, 8)), plan)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_in_eval_it_does_what_training_does_without_dropout(plan):
    torch.manual_seed(0)
    compare(Encoder(enable_nested_tensor=False).eval(), padded(), plan)
    compare(LanguageModel(subsequent).eval(), tokens(), plan)


def test_rows_packed_without_their_padding_are_refused_in_eval():
    with pytest.raises(CaptureError, match="enable_nested_tensor=False") as caught:
        capture(Encoder().eval(), padded(), entry="eval")
    assert f"{__file__}:" in str(caught.value)
