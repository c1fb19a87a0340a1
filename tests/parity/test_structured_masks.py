"""Attention without the masks that it need not read, on two ranks and beside the original."""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwright.ir import Op
from shardwright.ops.attention import STRUCTURED
from shardwright.parallelize import parallelize
from shardwright.plan.request import PlanRequest
from shardwright.verify.parity import ComparisonOptions, Reference, compare_plan, make_reference, make_task
from tests.options import grouped
from tests.parity.threaded import compare, whole_gradients
from tests.runtime.ranks import run_ranks

LENGTH = 8
SMALL = {
    "vocab_size": 31, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip


class Block(nn.Module):
    """Grouped heads, repeated by hand, and a mask that is made by hand."""

    def __init__(self, make_mask: Callable[..., Tensor]) -> None:
        super().__init__()
        self.q, self.kv, self.out, self.make_mask = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8), make_mask

    def forward(self, x: Tensor, *data: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, 4, 4).transpose(1, 2)
        k, v = (part.view(batch, length, 2, 4).transpose(1, 2) for part in self.kv(x).chunk(2, -1))
        k, v = (part[:, :, None].expand(batch, 2, 2, length, 4).reshape(batch, 4, length, 4) for part in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, self.make_mask(length, *data))
        return self.out(y.transpose(1, 2).reshape(batch, length, 16)).square().mean()


def causal(n: int) -> Tensor:
    return torch.arange(n)[None] <= torch.arange(n)[:, None]


def windowed(n: int) -> Tensor:
    return causal(n) & (torch.arange(n)[None] > torch.arange(n)[:, None] - 3)


def prefixed(n: int) -> Tensor:
    return causal(n) | (torch.arange(n)[None] < 3)


def padded(n: int, keys: Tensor) -> Tensor:
    return causal(n) & keys[:, None, None, :].bool()


def in_documents(n: int, ids: Tensor) -> Tensor:
    return causal(n) & (ids[:, None, :, None] == ids[:, None, None, :])


PRINTED = {
    causal: "is_causal=True, enable_gqa=True)",
    windowed: "before=2, after=0)",
    prefixed: "after=0, prefix=3)",
}


@pytest.mark.parametrize("plan", ["single", "dp=2", "tp=2", "tp=4", "dp=2,tp=2", "sp=2", "zero3=2"])
@pytest.mark.parametrize("make_mask", PRINTED)
def test_masks_made_by_hand(make_mask, plan):
    torch.manual_seed(0)
    compared = compare(Block(make_mask), (torch.randn(4, 6, 8),), plan)
    (line,) = [line for line in compared.ranks[0].text.splitlines() if "attention(" in line and "=" in line]
    assert PRINTED[make_mask] in line


KEYS = torch.tensor([[1] * 6, [0] * 4 + [1] * 2, [1] * 3 + [0] * 3, [1] * 6])
IDS = torch.tensor([[1, 1, 2, 2, 2, 2], [1] * 6, [2, 1, 1, 2, 3, 3], [1] * 5 + [2]])


@pytest.mark.parametrize("plan", ["single", "dp=2", "tp=2", "tp=4", "dp=2,tp=2", "sp=2", "zero3=2"])
@pytest.mark.parametrize(
    ("make_mask", "data", "printed"), [(padded, KEYS, "after=0, padding="), (in_documents, IDS, "after=0, documents=")]
)
def test_masks_of_data(make_mask, data, printed, plan):
    torch.manual_seed(0)
    compared = compare(Block(make_mask), (torch.randn(4, 6, 8), data), plan)
    (line,) = [line for line in compared.ranks[0].text.splitlines() if "attention(" in line and "=" in line]
    assert printed in line


# -- models of transformers


def llama(**options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2, **options))


def mistral(window: int) -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=window, use_cache=False))


def gemma() -> nn.Module:
    from transformers import GemmaConfig, GemmaForCausalLM

    return GemmaForCausalLM(GemmaConfig(**SMALL, num_key_value_heads=1, head_dim=8, pad_token_id=0))


def gemma3() -> nn.Module:
    """Layers with a window and layers without, in turn."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(
        Gemma3TextConfig(**SMALL, num_key_value_heads=1, head_dim=8, pad_token_id=0, sliding_window=4,
                         layer_types=["sliding_attention", "full_attention"])
    )  # fmt: skip


class PrefixModel(nn.Module):
    """A language model that sees all of a prompt at once."""

    def __init__(self, prompt: int) -> None:
        super().__init__()
        self.model, self.prompt = llama(), prompt

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        places = torch.arange(input_ids.shape[1])
        seen = (places[None] <= places[:, None]) | (places[None] < self.prompt)
        return self.model(input_ids=input_ids, labels=labels, attention_mask=seen[None, None])


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=31, n_positions=16, n_embd=16, n_layer=2, n_head=4, **drops))


def bert(longest: int = 64) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {**SMALL, "max_position_embeddings": longest}
    return BertForMaskedLM(BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(vocab_size=31, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4, dropout_rate=0.0,
                 decoder_start_token_id=0)
    )  # fmt: skip


PADDED = {"attention_mask": (torch.arange(LENGTH) < torch.tensor([8, 5, 6, 8])[:, None]).long()}
PADDED_LEFT = {"attention_mask": PADDED["attention_mask"].flip(1)}
PACKED = {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [*range(8)], [0, 0, 1, 2, 0, 1, 0, 1], [*range(8)]])}
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor], set[str]]] = {
    "llama": (llama, {}, {"causal"}),
    "llama, padded": (llama, PADDED, {"causal, padded keys by padding"}),
    "llama, padded on the left": (llama, PADDED_LEFT, {"causal, padded keys by padding"}),
    "llama, packed": (lambda: llama(use_cache=False), PACKED, {"causal, documents by documents"}),
    "prefix": (lambda: PrefixModel(3), {}, {"causal, a prefix of 3"}),
    "gemma": (gemma, {}, {"causal"}),
    "gemma3": (gemma3, {}, {"causal", "causal, a window of 4"}),
    "gemma3, padded": (
        gemma3,
        PADDED,
        {"causal, padded keys by padding", "causal, a window of 4, padded keys by padding"},
    ),
    "gpt2": (gpt2, {}, {"causal"}),
    "mistral, window of 4": (lambda: mistral(4), {}, {"causal, a window of 4"}),
    "mistral, packed": (lambda: mistral(4), PACKED, {"causal, a window of 4, documents by documents"}),
    "mistral, window of 64": (lambda: mistral(64), {}, {"causal"}),
    "bert": (bert, {}, {"full"}),
    "bert, padded": (bert, PADDED, {"padded keys by padding"}),
    "t5": (t5, {}, {"None", "full"}),  # position biases are data; the decoder sees all of the encoder
}


@cache
def reference_of(name: str) -> Reference:
    make, data, _ = MODELS[name]
    torch.manual_seed(0)
    ids = torch.randint(31, (4, LENGTH))
    example = {"input_ids": ids, "labels": ids, **data}
    return make_reference(make_task(make(), example, torch.float64, torch.device("cpu"), steps=3))


def attention_of(reference: Reference) -> list[Op]:
    graph = reference.side.captured("train").graph
    return [op for op in graph.ops if op.target in ("aten.scaled_dot_product_attention.default", STRUCTURED)]


@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers_say_what_their_masks_mean(name):
    reference, expected = reference_of(name), MODELS[name][2]
    graph = reference.side.captured("train").graph
    ops = attention_of(reference)
    assert {str(op.mask) for op in ops} == expected
    for op in ops:
        mask = op.tensor("attn_mask")
        assert (op.target == STRUCTURED) is (str(op.mask) not in ("None", "causal", "full") and name != "bert, padded")
        assert mask is None or op.mask is None or graph.values[mask].shape[-2] == 1
        assert bool(op.argument("is_causal")) is (str(op.mask) == "causal")
    assert all(check.passed for check in reference.checks)  # of the graph against the model


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers_train_as_the_original_does(name, plan):
    run = ComparisonOptions(limit=1e-10, timeout=300)
    report = compare_plan(reference_of(name), PlanRequest.read(plan), 2, run, name=plan)
    assert report.passed, report.failures[:3]


@pytest.mark.parametrize(("plan", "ranks"), [("single", 1), ("zero3=2", 2), ("pp=2", 2)])
@pytest.mark.parametrize("name", ["llama, packed", "prefix", "gemma3, padded", "mistral, window of 4", "bert, padded"])
def test_models_with_structured_masks_train_under_other_plans(name, plan, ranks):
    run = ComparisonOptions(limit=1e-10, timeout=300)
    report = compare_plan(reference_of(name), PlanRequest.read(plan), ranks, run, name=plan)
    assert report.passed, report.failures[:3]


# -- a buffer that holds a mask


class Buffered(nn.Module):
    """As nanoGPT keeps it: a buffer for the longest sequence, sliced in forward."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.register_buffer("bias", torch.ones(16, 16).tril().view(1, 1, 16, 16), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        n = x.shape[1]
        return F.scaled_dot_product_attention(q, k, v, self.bias[:, :, :n, :n] == 1).square().mean()


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero3=2"])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_buffer_that_holds_a_causal_mask(persistent, plan):
    torch.manual_seed(0)
    compared = compare(Buffered(persistent), (torch.randn(4, 6, 8),), plan)
    assert "is_causal=True" in compared.ranks[0].text


def test_other_values_in_that_buffer_are_noticed(tmp_path):
    torch.manual_seed(0)
    module, x = Buffered(True).double(), torch.randn(4, 6, 8, dtype=torch.float64)
    model = parallelize(copy.deepcopy(module), plan="single", compile={"directory": tmp_path})
    torch.testing.assert_close(model(x), module(x), rtol=1e-12, atol=1e-12)
    causal_program = model.generated
    model.load_state_dict(module.state_dict())  # the same values again
    model(x)
    assert len(list(tmp_path.rglob("*.py"))) == 1

    module.bias.fill_(1.0)
    model.load_state_dict(module.state_dict())
    torch.testing.assert_close(model(x), module(x), rtol=1e-12, atol=1e-12)
    module.bias.copy_(torch.ones(16, 16).tril(1))
    model.bias.copy_(module.bias)
    torch.testing.assert_close(model(x), module(x), rtol=1e-12, atol=1e-12)
    assert model.generated != causal_program


# -- batches with padding and without


def padding_of(*lengths: int) -> Tensor:
    return (torch.arange(6) < torch.tensor(lengths)[:, None]).long()


def calls_of(options: dict[str, Any], batches: list[tuple[Tensor, Tensor]], plan: str) -> list[list[Any]]:
    """On each of two ranks: the loss, the gradients and the program of each batch, with what the original gives."""
    torch.manual_seed(0)
    original = Block(padded).double()
    folder = Path(tempfile.mkdtemp(prefix="padding-"))

    def run(rank: int) -> list[Any]:
        model = parallelize(copy.deepcopy(original), plan=plan, **grouped(directory=folder, **options))
        seen = []
        for x, keys in batches:
            own = slice(2 * rank, 2 * rank + 2) if options else slice(None)
            model.zero_grad()
            loss = model(x[own], keys[own])
            loss.backward()
            programs = len(set(map(id, model._entries.values())))
            seen.append((loss.detach().clone(), whole_gradients(model), programs))
        return seen

    return run_ranks(2, run)


@pytest.mark.parametrize(
    ("plan", "options"),
    [("dp=2", {}), ("tp=2", {}), ("dp=2", {"inputs": "per_replica"}), ("dp=2", {"inputs": "per_rank"})],
)
def test_a_batch_without_padding_runs_without_a_mask(plan, options):
    torch.manual_seed(1)
    x = torch.randn(4, 6, 8, dtype=torch.float64)
    batches = [
        (x, padding_of(6, 6, 6, 6)),
        (x, padding_of(6, 6, 6, 4)),  # only the second replica has padding
        (2 * x, padding_of(6, 6, 6, 6)),
        (x, padding_of(3, 6, 6, 6)),
    ]
    for seen in calls_of(options, batches, plan):
        torch.manual_seed(0)
        original = Block(padded).double()
        assert [count for *_, count in seen] == [2, 2, 2, 2]  # programs: for any batch, and for those without padding
        for (loss, gradients, _), (inputs, keys) in zip(seen, batches, strict=True):
            original.zero_grad()
            expected = original(inputs, keys)
            expected.backward()
            if options.get("inputs") != "per_replica":  # where each has the loss of its own samples
                torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
            for name, parameter in original.named_parameters():
                torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-12)


def test_which_program_runs_is_alike_on_all_ranks(tmp_path):
    """Of two replicas one has padding: both take the program with a mask, or their collectives would not meet."""
    torch.manual_seed(0)
    original, x = Block(padded).double(), torch.randn(4, 6, 8, dtype=torch.float64)

    def run(rank: int) -> list[bool]:
        model = parallelize(copy.deepcopy(original), plan="dp=2", compile={"directory": tmp_path}, inputs="per_replica")
        chosen = []
        for keys in (padding_of(6, 6, 6, 4), padding_of(6, 6, 6, 6), padding_of(6, 6, 6, 4)):
            own = slice(2 * rank, 2 * rank + 2)
            entry = model._entry((x[own], keys[own]), {})
            chosen.append("is_causal=True" in entry.path.read_text())
        return chosen

    assert run_ranks(2, run) == [[False, True, False]] * 2


UNPADDED = {"attention_mask": torch.ones(2, 300, dtype=torch.long)}
HALF_PADDED = {"attention_mask": (torch.arange(300) < torch.tensor([300, 170])[:, None]).long()}
RESTARTED = {"position_ids": torch.arange(300).remainder(70).expand(2, -1)}


@pytest.mark.parametrize(
    ("make", "data"),
    [
        (llama, {}),
        (llama, UNPADDED),
        (llama, HALF_PADDED),
        (lambda: llama(use_cache=False), RESTARTED),
        (lambda: mistral(32), {}),
        (lambda: mistral(32), HALF_PADDED),
        (lambda: mistral(32), RESTARTED),
        (lambda: bert(300), HALF_PADDED),
    ],
)
def test_no_tensor_of_queries_by_keys_is_made(make, data, tmp_path):
    """On one rank, forward and backward: nothing as large as its length by its length is allocated."""
    length = 300
    torch.manual_seed(0)
    ids = torch.randint(31, (2, length))
    example = {"input_ids": ids, "labels": ids, **data}
    model = parallelize(make(), plan="single", example=example, compile={"directory": tmp_path})
    sizes: set[tuple[int, ...]] = set()

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            sizes.update(tuple(leaf.shape) for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
            return result

    with Noted():
        model(**example).loss.backward()
    assert (2, length, 31) in sizes
    assert not [shape for shape in sizes if shape[-2:] == (length, length) or math.prod(shape) >= length**2]
