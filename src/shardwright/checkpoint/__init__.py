"""Checkpoints: saved under one plan, loaded under another; and plain weights in safetensors files.

A checkpoint is a folder: tensors in safetensors files, everything else in JSON, and a manifest with
a digest of every file, written last. Read `training.py` (what is saved), `saving.py`, `loading.py`, then `index.py`
and `tensorfile.py` (the format), `folder.py` (many checkpoints) and `weights.py` (export). See docs/checkpoints.md.
"""

from .convert import checkpoint_at, convert
from .folder import CheckpointFolder, checkpoints_in
from .loading import Loaded, Opened, load, open_checkpoint
from .manifest import verify
from .saving import PendingSave, save
from .weights import full_weights, load_weights, save_weights

__all__ = [
    "CheckpointFolder",
    "Loaded",
    "Opened",
    "PendingSave",
    "checkpoint_at",
    "checkpoints_in",
    "convert",
    "full_weights",
    "load",
    "load_weights",
    "open_checkpoint",
    "save",
    "save_weights",
    "verify",
]
