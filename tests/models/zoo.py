"""Every small model of the parity tests: `ZOO[name](dtype=torch.float64)` gives (module, args, kwargs).

A build seeds torch's generator, so two builds of one name are equal. The loss is `loss_of(output)`.
All modules are in training mode. Batch 4 unless asked otherwise. The nets are in `nets.py`, `transformer.py`
and `hugging_face.py`; here is only how they are configured and what they are fed.
"""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwright.data import PackedDocuments, Packing, loader

from . import hugging_face, nets, transformer
from .packed_gpt import PackedGPT
from .transformer import TransformerConfig

VOCAB, SEQ, WIDTH = 64, 12, 32

# These cast to float32 in their own code (norms, rotary tables, the loss): as they are, float64 parity
# ends at about 5e-8; a float64 comparison has to promote those casts on both sides.
CASTS_TO_FLOAT32 = frozenset({"hf_llama", "hf_llama_packed", "hf_gpt2", "hf_t5"})


class Case(NamedTuple):
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


Builder = Callable[..., Case]
ZOO: dict[str, Builder] = {}
_SEEDED = threading.Lock()  # ranks that are threads share torch's one global generator


def loss_of(output: Any) -> Tensor:
    """The loss of a model that returns it, or an output object that carries it."""
    return output if isinstance(output, Tensor) else output.loss


def case(make: Callable[[torch.dtype, int], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]) -> Builder:
    """Register a builder under its own name, seeded."""

    def build(*, dtype: torch.dtype = torch.float32, batch: int = 4, seed: int = 0) -> Case:
        with _SEEDED, torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module, args, kwargs = make(dtype, batch)
        return Case(module.to(dtype).train(), args, kwargs)

    ZOO[make.__name__] = build
    return build


def tokens(batch: int, vocab: int = VOCAB, seq: int = SEQ) -> tuple[Tensor, Tensor]:
    window = torch.randint(vocab, (batch, seq + 1))
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def packed(batch: int, vocab: int, *, shift_labels: bool) -> dict[str, Tensor]:
    """Documents of unequal lengths, packed."""
    lengths = torch.randint(2, SEQ + 1, (4 * batch,)).tolist()
    documents = [torch.randint(vocab, (length,)) for length in lengths]
    sequences = PackedDocuments(documents, Packing(length=SEQ, shift_labels=shift_labels, window=2))
    batches: list[dict[str, Tensor]] = list(loader(sequences, batch, last="drop"))
    return batches[0]


# Plain nets.


@case
def mlp(dtype, batch):
    return nets.MLP(16, 32), (torch.randn(batch, 16, dtype=dtype), torch.randn(batch, 16, dtype=dtype)), {}


@case
def resnet(dtype, batch):
    images = torch.randn(batch, 3, 16, 16, dtype=dtype)
    return nets.ResNet(channels=8, classes=10), (images, torch.randint(10, (batch,))), {}


@case
def unet(dtype, batch):
    images = torch.randn(batch, 2, 16, 16, dtype=dtype)
    return nets.UNet(channels=8), (images, torch.randn(batch, 2, 16, 16, dtype=dtype)), {}


@case
def repeated(dtype, batch):
    return nets.Repeated(16, times=4), (torch.randn(batch, 16, dtype=dtype), torch.randn(batch, 16, dtype=dtype)), {}


@case
def masked(dtype, batch):
    return nets.Masked(16, depth=6), (torch.randn(batch, 16, dtype=dtype), torch.randn(batch, 16, dtype=dtype)), {}


@case
def contrastive(dtype, batch):
    pair = (torch.randn(batch, 12, dtype=dtype), torch.randn(batch, 20, dtype=dtype))
    return nets.Contrastive(12, 20, 16), pair, {}


@case
def regularized(dtype, batch):
    pair = (torch.randn(batch, 16, dtype=dtype), torch.randn(batch, 8, dtype=dtype))
    return nets.Regularized(16, 32, 8), pair, {}


@case
def lora(dtype, batch):
    pair = (torch.randn(batch, 16, dtype=dtype), torch.randn(batch, 16, dtype=dtype))
    return nets.LoRA(16, 32, rank=4), pair, {}


@case
def swiglu(dtype, batch):
    shape = (batch, SEQ, 16)
    return nets.SwiGLU(16, 32), (torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)), {}


@case
def autocast_mlp(dtype, batch):
    """Autocast leaves float64 as it is: this one means something in float32 only."""
    pair = (torch.randn(batch, 16, dtype=dtype), torch.randn(batch, 16, dtype=dtype))
    return nets.AutocastMLP(16, 32), pair, {}


@case
def custom_backward(dtype, batch):
    pair = (torch.randn(batch, 16, dtype=dtype), torch.randn(batch, 16, dtype=dtype))
    return nets.CustomBackward(16, 32), pair, {}


# Transformers.


def transformer_case(batch: int, **options: Any) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    config = TransformerConfig(**{"vocab": VOCAB, "seq": SEQ, "d": WIDTH, **options})
    return transformer.Transformer(config), tokens(batch, config.vocab, config.seq), {}


@case
def gpt(dtype, batch):
    return transformer_case(batch)


@case
def gpt_deep(dtype, batch):
    """Deep enough that a stage of four has layers to loop over."""
    return transformer_case(batch, d=16, n_layer=13)


@case
def gpt_ignore(dtype, batch):
    """Labels that count: all of the first row, ever fewer below, so that every half has another number."""
    module, (idx, target), kwargs = transformer_case(batch)
    for row in range(1, batch):
        target[row, : SEQ - max(1, (SEQ - 2) // (row + 1))] = -100
    return module, (idx, target), kwargs


@case
def gpt_odd_vocab(dtype, batch):
    return transformer_case(batch, vocab=131)


@case
def dropout_gpt(dtype, batch):
    return transformer_case(batch, dropout=0.1)


@case
def checkpointed_gpt(dtype, batch):
    return transformer_case(batch, checkpoint=True)


@case
def gqa_fused(dtype, batch):
    """The rows of the fused weight are three sections: 4 heads of queries, 2 of keys, 2 of values."""
    return transformer_case(batch, n_head=4, n_kv=2)


@case
def rotary(dtype, batch):
    return transformer_case(batch, rotary=True)


# Hugging Face.


@case
def hf_llama(dtype, batch):
    idx, _ = tokens(batch)
    return hugging_face.llama(VOCAB, WIDTH), (idx,), {"labels": idx.clone(), "use_cache": False}


@case
def gpt_packed(dtype, batch):
    return PackedGPT(), (), packed(batch, PackedGPT.vocabulary, shift_labels=True)


@case
def hf_llama_packed(dtype, batch):
    batched = packed(batch, VOCAB, shift_labels=False)
    return hugging_face.llama(VOCAB, WIDTH), (), {**batched, "use_cache": False}


@case
def hf_gpt2(dtype, batch):
    idx, _ = tokens(batch)
    return hugging_face.gpt2(VOCAB, WIDTH, SEQ), (idx,), {"labels": idx.clone(), "use_cache": False}


@case
def hf_bert_pretraining(dtype, batch):
    idx, labels = tokens(batch)
    labels[:, ::3] = -100
    kwargs = {"labels": labels, "next_sentence_label": torch.randint(2, (batch,))}
    return hugging_face.bert(VOCAB, WIDTH, SEQ), (idx,), kwargs


@case
def hf_t5(dtype, batch):
    idx, _ = tokens(batch)
    labels = torch.randint(1, VOCAB, (batch, 8))
    return hugging_face.t5(VOCAB, WIDTH), (idx,), {"labels": labels, "use_cache": False}


@case
def hf_vit(dtype, batch):
    images = torch.randn(batch, 3, 16, 16, dtype=dtype)
    return hugging_face.vit(WIDTH, labels=10), (images,), {"labels": torch.randint(10, (batch,))}
