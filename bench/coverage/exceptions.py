"""What names of attributes don't tell, as data: by model type, also of parts of a config."""

from __future__ import annotations

from typing import Any

# Attributes of a config.
CONFIGS: dict[str, dict[str, Any]] = {
    "wav2vec2": {"conv_dim": [32, 32], "conv_stride": [5, 2], "conv_kernel": [10, 3]},
}

# Sizes of inputs, or inputs that a model needs beside the usual.
INPUTS: dict[str, dict[str, Any]] = {}

# Model types that are no rows, and why: there is nothing to train, or no config can be made without more.
LEFT_OUT: dict[str, str] = {}

# Model types that can't be right, and why: looked up in the source of the model.
AT_FAULT: dict[str, str] = {}
