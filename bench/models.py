"""The models of the race: real architectures at sizes whose step takes 0.05 to 0.5 s on two cores.

Each takes a batch and its labels and returns the loss. Dropout is off, so that every contender has the losses of one
device. What a peer has to be told about an architecture is here too: which of its modules are layers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from examples.gpt import GPT, GPTConfig
from torch import Tensor, nn

from .workload import Workload

Kind = Literal["gpt", "llama", "mixtral", "gpt2", "bert", "t5", "vit", "resnet"]


class WithLoss(nn.Module):
    """A model of transformers and the loss of its logits."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__()
        self.model, self.options = model, options

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        decoder = {"decoder_input_ids": x} if self.model.config.is_encoder_decoder else {}
        return loss_of_logits(self.model(x, **decoder, **self.options).logits, labels)


def loss_of_logits(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How a kind of model is built, and where its layers are."""

    make: Callable[..., nn.Module]
    layers: tuple[str, ...]


def _transformers(name: str, config: str, **fixed: Any) -> Callable[..., nn.Module]:
    def make(**sizes: Any) -> nn.Module:
        import transformers

        model = getattr(transformers, name)(getattr(transformers, config)(**sizes, **fixed))
        if name.startswith("Mixtral"):
            model.set_experts_implementation("eager")
        return WithLoss(model, **({"use_cache": False} if "use_cache" in fixed else {}))

    return make


def _gpt(*, tied: bool = True, **sizes: Any) -> nn.Module:
    model = GPT(GPTConfig(**sizes))
    if not tied:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model


_STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_STILL_GPT2 = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
ARCHITECTURES: dict[Kind, Architecture] = {
    "gpt": Architecture(make=_gpt, layers=("blocks",)),
    "llama": Architecture(
        make=_transformers("LlamaForCausalLM", "LlamaConfig", use_cache=False), layers=("model.model.layers",)
    ),
    "mixtral": Architecture(
        make=_transformers("MixtralForCausalLM", "MixtralConfig", use_cache=False), layers=("model.model.layers",)
    ),
    "gpt2": Architecture(
        make=_transformers("GPT2LMHeadModel", "GPT2Config", use_cache=False, **_STILL_GPT2),
        layers=("model.transformer.h",),
    ),
    "bert": Architecture(
        make=_transformers("BertForMaskedLM", "BertConfig", **_STILL), layers=("model.bert.encoder.layer",)
    ),
    "t5": Architecture(
        make=_transformers("T5ForConditionalGeneration", "T5Config", use_cache=False, dropout_rate=0.0),
        layers=("model.encoder.block", "model.decoder.block"),
    ),
    "vit": Architecture(
        make=_transformers("ViTForImageClassification", "ViTConfig", **_STILL), layers=("model.vit.layers",)
    ),
    "resnet": Architecture(
        make=_transformers("ResNetForImageClassification", "ResNetConfig", layer_type="basic"),
        layers=tuple(f"model.resnet.encoder.stages.{at}.layers" for at in range(4)),
    ),
}


@dataclass(frozen=True, kw_only=True)
class ModelWorkload(Workload):
    """A model of a kind with its sizes; those of transformers are named as its config does."""

    kind: Kind
    sizes: Mapping[str, Any] = field(hash=False)
    image: int | None = None  # side of an image, instead of `seq` tokens

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return ARCHITECTURES[self.kind].make(**self.sizes).train()

    def layers(self, model: nn.Module) -> list[nn.Module]:
        """The modules that FSDP2 shards one by one."""
        return [layer for path in ARCHITECTURES[self.kind].layers for layer in model.get_submodule(path).children()]

    def batches(self, count: int) -> list[tuple[Tensor, Tensor]]:
        if self.image is None:
            return super().batches(count)
        generator = torch.Generator().manual_seed(1)
        images = torch.randn((count, self.batch, 3, self.image, self.image), generator=generator)
        return [*zip(images, torch.randint(self.vocab, (count, self.batch), generator=generator), strict=True)]


def _llama(seq: int, d: int) -> ModelWorkload:
    sizes = {"vocab_size": 4096, "hidden_size": d, "intermediate_size": 11 * d // 4, "num_hidden_layers": 4,
             "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": seq}  # fmt: skip
    return ModelWorkload(name=f"llama-{seq}", kind="llama", sizes=sizes, seq=seq, batch=4, vocab=4096)


_ENCODER = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}
MODELS: dict[str, ModelWorkload] = {
    work.name: work
    for work in (
        _llama(256, 256),
        _llama(1024, 128),
        _llama(2048, 128),
        ModelWorkload(
            name="gpt2", kind="gpt2", seq=128, batch=8, vocab=4096,
            sizes={"vocab_size": 4096, "n_embd": 256, "n_layer": 4, "n_head": 8, "n_positions": 128,
                   "bos_token_id": 0, "eos_token_id": 0},
        ),
        ModelWorkload(
            name="bert", kind="bert", seq=128, batch=8, vocab=4096,
            sizes={**_ENCODER, "vocab_size": 4096, "max_position_embeddings": 128},
        ),
        ModelWorkload(
            name="t5", kind="t5", seq=128, batch=8, vocab=4096,
            sizes={"vocab_size": 4096, "d_model": 256, "d_ff": 768, "num_layers": 3, "num_heads": 8, "d_kv": 32,
                   "decoder_start_token_id": 0},
        ),
        ModelWorkload(
            name="vit", kind="vit", image=64, batch=16, vocab=100,
            sizes={**_ENCODER, "image_size": 64, "patch_size": 8, "num_labels": 100},
        ),
        ModelWorkload(
            name="resnet", kind="resnet", image=64, batch=16, vocab=100,
            sizes={"embedding_size": 32, "hidden_sizes": [32, 64, 128, 256], "depths": [2, 2, 2, 2],
                   "num_labels": 100},
        ),
        ModelWorkload(
            name="mixtral", kind="mixtral", seq=128, batch=8, vocab=4096,
            sizes={"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
                   "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 128,
                   "num_local_experts": 4, "num_experts_per_tok": 2},
        ),
        ModelWorkload(
            name="vocabulary-32k", kind="gpt", seq=128, batch=8, vocab=32768,
            sizes={"vocab": 32768, "seq": 128, "n_layer": 2, "n_head": 4, "d": 128},
        ),
        ModelWorkload(
            name="thin-24", kind="gpt", seq=128, batch=8, vocab=512,
            sizes={"vocab": 512, "seq": 128, "n_layer": 24, "n_head": 4, "d": 64, "tied": False},
        ),
    )
}  # fmt: skip
"""The race, by name."""
