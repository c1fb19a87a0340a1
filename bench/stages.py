"""Stages for `torch.distributed.pipelining`, divided by hand as its documentation says: layers are shared out evenly,
embeddings go to the first stage and the head to the last.
"""

import torch
from examples.gpt import GPT
from torch import Tensor, nn

from .models import WithLoss


class GPTStage(nn.Module):
    def __init__(self, model: GPT, start: int, end: int) -> None:
        super().__init__()
        self.blocks = model.blocks[start:end]
        self.enter = nn.ModuleList([model.wte, model.wpe]) if start == 0 else None
        self.leave = nn.ModuleList([model.ln, model.head]) if end == len(model.blocks) else None

    def forward(self, x: Tensor) -> Tensor:
        if self.enter is not None:
            x = self.enter[0](x) + self.enter[1](torch.arange(x.size(1)))
        for block in self.blocks:
            x = block(x)
        if self.leave is not None:
            x = self.leave[1](self.leave[0](x))
        return x


class DecoderStage(nn.Module):
    """Of a Llama or Mixtral of transformers: the other layers are taken out of it."""

    def __init__(self, model: WithLoss, start: int, end: int) -> None:
        super().__init__()
        decoder, last = model.model.model, end == len(model.model.model.layers)
        decoder.layers, decoder.config.num_hidden_layers = decoder.layers[start:end], end - start
        self.input = "input_ids" if start == 0 else "inputs_embeds"
        if start:
            decoder.embed_tokens = None
        if not last:
            decoder.norm = nn.Identity()
        self.decoder, self.head = decoder, model.model.lm_head if last else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.decoder(**{self.input: x}, use_cache=False).last_hidden_state)


class VisionStage(nn.Module):
    """Of a ViT of transformers."""

    def __init__(self, model: WithLoss, start: int, end: int) -> None:
        super().__init__()
        vit = model.model.vit
        self.enter = vit.embeddings if start == 0 else None
        self.layers = vit.layers[start:end]
        self.leave = nn.ModuleList([vit.layernorm, model.model.classifier]) if end == len(vit.layers) else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.enter is None else self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.leave is None else self.leave[1](self.leave[0](x)[:, 0])


STAGES = {"gpt": GPTStage, "llama": DecoderStage, "mixtral": DecoderStage, "vit": VisionStage}
"""By kind of model."""
