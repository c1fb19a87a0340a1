"""Checkpoints: saved under one plan, loaded under another; and ordinary weights in safetensors files.

A checkpoint is a folder. Its tensors are in files of the safetensors format, all else is JSON, and
a manifest with a digest of every file is written last. See docs/checkpoints.md.
"""

from .loading import Loaded, load
from .saving import Saving, save

__all__ = ["Loaded", "Saving", "load", "save"]
