"""PyTorch's own transformer layers, which look at the values of their masks.

`nn.TransformerEncoder` and `nn.TransformerDecoder` compare a mask with the causal one, to pass a hint on. A mask that
the model makes is known while it is traced (constant_values.py) and compared. Of one that is passed in, or is a
buffer, nothing is known: it is used as it is, which computes the same.

In eval and without gradients, an encoder that is given a padding mask packs its samples without the padding, if the
mask pads at the end only, and then writes zeros where the padding was. That depends on data, so it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import transformer

from ...errors import CaptureError
from ..user_calls.kept import KeptCalls, current
from .constant_values import ConstantValues


@contextmanager
def traceable_masks(user_calls: KeptCalls, known: ConstantValues) -> Iterator[None]:
    """For the length of a trace, masks are compared with the causal one only where their values are known."""
    layers: Any = transformer
    detect, forward = layers._detect_is_causal_mask, nn.TransformerEncoder.forward

    def detect_known(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        if current() is user_calls and is_causal is None and mask is not None and not known.knows(mask):
            return False
        causal: bool = detect(mask, is_causal, size)
        return causal

    def encode(
        self: nn.TransformerEncoder, src: Tensor, mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None, is_causal: bool | None = None,
    ) -> Tensor:  # fmt: skip
        if current() is user_calls and mask is None and src_key_padding_mask is not None:
            _refuse_packing(self)
        return forward(self, src, mask, src_key_padding_mask, is_causal)

    patched: Any = nn.TransformerEncoder
    try:
        layers._detect_is_causal_mask, patched.forward = detect_known, encode
        yield
    finally:
        layers._detect_is_causal_mask, patched.forward = detect, forward


def _refuse_packing(encoder: nn.TransformerEncoder) -> None:
    packs = getattr(encoder, "use_nested_tensor", False) and torch.backends.mha.get_fastpath_enabled()
    if packs and not encoder.layers[0].training:
        raise CaptureError(
            "in eval an nn.TransformerEncoder that is given src_key_padding_mask may pack samples as nested tensors "
            "and write zeros where the padding is, depending on the mask and on whether gradients are wanted. Build it "
            "with enable_nested_tensor=False (or set encoder.use_nested_tensor = False before sw.parallelize)."
        )
