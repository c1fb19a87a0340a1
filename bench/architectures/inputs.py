"""A small batch for any model: what its forward asks for by name, and labels that fit its head.

How many places of a text stand for an image is not written anywhere: the model says it when
the numbers don't match, so it is asked (`fit`).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .configs import WIDTH, CannotBuild
from .exceptions import INPUTS
from .listed import Architecture

BATCH, LENGTH, FRAMES = 4, 16, 64
IMAGE_TEXT = ("image_token_id", "image_token_index", "image_token")
AUDIO_TEXT = ("audio_token_id", "audio_token_index", "audio_token")


class Maker:
    """The inputs of one model."""

    def __init__(self, architecture: Architecture, model: Any) -> None:
        self.head, self.kind, self.model, self.config = architecture.head, architecture.kind, model, model.config
        self.parameters = inspect.signature(model.forward).parameters
        self.special = INPUTS.get(architecture.model_type, {})
        self.length: int = self.special.get("length", LENGTH)
        self.generator = torch.Generator().manual_seed(0)
        self.text = _text_of(model.config)
        self.turned = self.masked = False  # features as [bins, frames]; with masks of ones for them
        self.places: dict[str, int] = {}  # a special token -> how many places it takes in a row

    def numbers(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def ids(self, *shape: int, high: int | None = None, low: int = 4) -> Tensor:
        size = high or max((getattr(self.text, "vocab_size", None) or 128) - 25, 8)
        return torch.randint(min(low, size - 1), size, shape, generator=self.generator)

    def batch(self) -> dict[str, Any]:
        """The inputs, without labels."""
        self.generator.manual_seed(0)
        by_name: dict[str, Any] = {}
        wanted = self.special.get("inputs")
        if isinstance(wanted, dict):
            return {name: make(self) if callable(make) else make for name, make in wanted.items()}
        for name, make in MAKERS.items():
            if name in self.parameters and (wanted is None or name in wanted):
                by_name[name] = make(self)
        by_name = {name: value for name, value in by_name.items() if value is not None}
        if not any(isinstance(value, Tensor) for value in by_name.values()):
            raise CannotBuild(f"its forward takes {', '.join(list(self.parameters)[:6])}: nothing that is known here")
        for name, make in self.special.get("more", {}).items():
            by_name[name] = make(self) if callable(make) else make
        return by_name

    def labels(self, outputs: Any, inputs: dict[str, Any]) -> dict[str, Any] | None:
        """What the model takes to compute a loss, or None if it computes none."""
        if "labels" in self.special:
            actual = self.special["labels"]
            return {name: make(self) if callable(make) else make for name, make in actual.items()} if actual else None
        if "return_loss" in self.parameters:
            return {"return_loss": True}
        if "labels" not in self.parameters:
            return None
        return {"labels": self._labels(outputs, inputs)}

    def _labels(self, outputs: Any, inputs: dict[str, Any]) -> Any:
        logits = next((x for x in _tensors(outputs) if x.is_floating_point()), None)
        if logits is None:
            raise CannotBuild("it returns no tensor that labels could be for")
        if self.head in ("IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION", "VIDEO_CLASSIFICATION",
                         "SEQUENCE_CLASSIFICATION"):  # fmt: skip
            return self.ids(BATCH, high=self.config.num_labels, low=0)
        if self.head == "SEMANTIC_SEGMENTATION":
            height, width = inputs["pixel_values"].shape[-2:]
            return self.ids(BATCH, height, width, high=self.config.num_labels, low=0)
        if self.head in ("DEPTH_ESTIMATION", "IMAGE_TO_IMAGE"):
            return self.numbers(*logits.shape).abs()
        if self.head == "OBJECT_DETECTION":
            return [{"class_labels": self.ids(2, high=self.config.num_labels, low=0), "boxes": _boxes(self, 2)}
                    for _ in range(BATCH)]  # fmt: skip
        if self.head == "VISUAL_QUESTION_ANSWERING" and logits.dim() == 2:
            return torch.rand(logits.shape, generator=self.generator)
        if self.head == "CTC":
            return self.ids(BATCH, 4, low=1)
        if "input_ids" in inputs and "decoder_input_ids" not in self.parameters:
            result = inputs["input_ids"].clone()
            result[:, :3] = -100
            if self.kind == "multimodal":
                result[(result >= self.ids_end())] = -100
            return result
        return self.ids(BATCH, self.length)

    def ids_end(self) -> int:
        return int((getattr(self.text, "vocab_size", None) or 128) - 25)

    # One small function for each name that a forward may ask for.

    def input_ids(self) -> Tensor | None:
        if self.kind == "audio" and "input_features" in self.parameters and not self.places:
            return None
        more = sum(self.places.values())
        row = self.ids(BATCH, self.length + more)
        start = 2
        for name, count in self.places.items():
            row[:, start : start + count] = int(getattr(self.config, name))
            start += count
        return row

    def pixel_values(self) -> Tensor | None:
        if {"image_grid_thw", "image_grid_hws", "spatial_shapes", "image_position_ids"} & set(self.parameters):
            return None  # images in rows of patches of any number: the text alone
        vision = _vision_of(self.config)
        height, width = _pair(self.special.get("image") or getattr(vision, "image_size", None) or 32)
        channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None)
        channels = channels if isinstance(channels, int) else 3
        frames = self.special.get("frames")
        if self.head.startswith("VIDEO"):
            frames = frames or getattr(vision, "num_frames", None)
        shape = (BATCH, frames, channels, height, width) if frames else (BATCH, channels, height, width)
        return self.numbers(*shape)

    def input_values(self) -> Tensor | None:
        if hasattr(self.config, "num_mel_bins") and "frequency_stride" in self.config.to_dict():  # a spectrogram
            return self.numbers(BATCH, self.config.max_length, self.config.num_mel_bins)
        return self.numbers(BATCH, self.special.get("samples", 640))

    def input_features(self) -> Tensor | None:
        parts = (getattr(self.config, name, None) for name in ("audio_config", "encoder_config"))
        audio = next((part for part in parts if part is not None), self.config)
        names = ("num_mel_bins", "input_feat_per_channel", "feature_size", "input_dim")
        bins = next((getattr(audio, name) for name in names if getattr(audio, name, None)), 16)
        self.frames = self.special.get("frames", FRAMES)
        return self.numbers(BATCH, bins, self.frames) if self.turned else self.numbers(BATCH, self.frames, bins)

    def mask(self) -> Tensor | None:
        return torch.ones(BATCH, self.special.get("frames", FRAMES), dtype=torch.long) if self.masked else None

    def bool_masked_pos(self) -> Tensor | None:
        if self.head != "MASKED_IMAGE_MODELING":
            return None
        height, width = _pair(self.config.image_size)
        patch = _pair(self.config.patch_size)
        return torch.arange(BATCH * (height // patch[0]) * (width // patch[1])).view(BATCH, -1) % 3 == 0

    def decoder_input_ids(self) -> Tensor | None:
        return self.ids(BATCH, self.length)

    def bbox(self) -> Tensor:
        return _boxes(self, self.length, scale=32).long()


MAKERS: dict[str, Callable[[Maker], Any]] = {
    "input_ids": Maker.input_ids,
    "pixel_values": Maker.pixel_values,
    "input_values": Maker.input_values,
    "input_features": Maker.input_features,
    "bool_masked_pos": Maker.bool_masked_pos,
    "decoder_input_ids": Maker.decoder_input_ids,
    "bbox": Maker.bbox,
    "input_features_mask": Maker.mask,
    "feature_attention_mask": Maker.mask,
    "attention_mask": lambda maker: maker.mask() if maker.kind == "audio" else None,
}


def fit(maker: Maker) -> tuple[dict[str, Any], Any]:
    """Inputs that the model takes, and what it returns for them."""
    for name in (*IMAGE_TEXT, *AUDIO_TEXT):
        modal = "pixel_values" if name in IMAGE_TEXT else "input_features"
        token = getattr(maker.config, name, None)
        known = {getattr(maker.config, place) for place in maker.places}
        if isinstance(token, int) and token not in known and maker.batch().get(modal) is not None:
            maker.places[name] = 1
    first: CannotBuild | None = None
    for maker.turned, maker.masked in ((False, False), (True, False), (False, True), (True, True)):
        try:
            return _accepted_batch(maker)
        except CannotBuild as error:
            first = first or error
        if "input_features" not in maker.parameters:
            break
    assert first is not None
    raise first


def _accepted_batch(maker: Maker) -> tuple[dict[str, Any], Any]:
    """Ask the model how many places it wants for an image, until it is content."""
    for _ in range(3):
        inputs = maker.batch()
        try:
            with torch.no_grad():
                return inputs, maker.model(**inputs)
        except Exception as error:
            count = re.search(r"tokens:? \(?(\d+)\)?.*?features:? \(?(\d+)", str(error), re.S)
            if count is None or not maker.places:
                raise CannotBuild(message(error)) from error
            modal = AUDIO_TEXT if "udio" in str(error) else IMAGE_TEXT
            name = next((name for name in maker.places if name in modal), next(iter(maker.places)))
            wanted = int(count[2]) // BATCH
            maker.places[name] = wanted if wanted != maker.places[name] else wanted // WIDTH  # some count elements
    raise CannotBuild(f"the number of places for an image is not to be found, lastly {maker.places}")


def message(error: BaseException) -> str:
    """An error in one line, with the line of the model that it names."""
    text = re.sub(r"\S*/site-packages/", "", str(error))  # where a package lies is this machine's business
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {' '.join(lines[:3])}"[:300]


def _text_of(config: Any) -> Any:
    actual = config.get_text_config() if hasattr(config, "get_text_config") else config
    return actual if hasattr(actual, "vocab_size") else config


def _vision_of(config: Any) -> Any:
    for name in ("vision_config", "backbone_config", "image_config", "vision_encoder_config", "encoder"):
        attribute = getattr(config, name, None)
        if attribute is not None and hasattr(attribute, "num_channels" if name == "backbone_config" else "image_size"):
            return attribute
    return config


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (int(size[-2]), int(size[-1]))


def _boxes(maker: Maker, count: int, scale: int = 1) -> Tensor:
    low = torch.rand(BATCH if scale > 1 else 1, count, 2, generator=maker.generator) * 0.4 + 0.1
    actual = torch.cat([low, low + 0.3], dim=-1) * scale
    return actual if scale > 1 else actual[0]


def _tensors(outputs: Any) -> list[Tensor]:
    from torch.utils import _pytree as pytree

    return [leaf for leaf in pytree.tree_leaves(tuple(outputs.values()) if hasattr(outputs, "values") else outputs)
            if isinstance(leaf, Tensor)]  # fmt: skip
