"""What names of attributes don't tell, as data: by model type, also of parts of a config."""

from __future__ import annotations

from typing import Any

# Attributes of a config.
CONFIGS: dict[str, dict[str, Any]] = {
    "wav2vec2": {"conv_dim": [32, 32], "conv_stride": [5, 2], "conv_kernel": [10, 3]},
    "xlm": {"emb_dim": 32},
    "flaubert": {"emb_dim": 32},
    "distilbert": {"dim": 32, "hidden_dim": 64},
    "gemma4_text": {"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 16},
    "janus_vqgan": {"base_channels": 32, "latent_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1},
    "dinov3_convnext": {"hidden_sizes": [8, 16, 32, 64], "depths": [1, 1, 1, 1]},
    "vits": {"flow_size": 32, "spectrogram_bins": 33, "upsample_initial_channel": 32, "upsample_rates": [2, 2],
             "upsample_kernel_sizes": [4, 4], "duration_predictor_filter_channels": 32, "wavenet_dilation_rate": 1},
    "mgp-str": {"num_bpe_labels": 40, "num_wordpiece_labels": 40},
    "cpmant": {"dim_head": 8, "dim_ff": 64},
    "ctrl": {"dff": 64},
    "canine": {"num_hash_buckets": 128, "local_transformer_stride": 8, "downsampling_rate": 4},
}

# Sizes of inputs, or inputs that a model needs beside the usual.
INPUTS: dict[str, dict[str, Any]] = {}

# Model types that are no rows, and why: there is nothing to train, or no config can be made without more.
LEFT_OUT: dict[str, str] = {}

# Model types that can't be right, and why: looked up in the source of the model.
AT_FAULT: dict[str, str] = {}
