"""Checkpoints: saved under one plan, loaded under another; and ordinary weights in safetensors files.

A checkpoint is a folder. Its tensors are in files of the safetensors format, all else is JSON, and
a manifest with a digest of every file is written last. See docs/checkpoints.md.
"""

from .convert import checkpoint_at, convert
from .folder import CheckpointFolder, checkpoints_in
from .loading import Loaded, Opened, load, open_checkpoint
from .manifest import verify
from .saving import PendingSave, save
from .weights import load_weights, save_weights

__all__ = [
    "CheckpointFolder",
    "Loaded",
    "Opened",
    "PendingSave",
    "checkpoint_at",
    "checkpoints_in",
    "convert",
    "load",
    "load_weights",
    "open_checkpoint",
    "save",
    "save_weights",
    "verify",
]
