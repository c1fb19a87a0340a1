"""What names of attributes don't tell, as data: by model type, also of parts of a config."""

from __future__ import annotations

from typing import Any

import torch

MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
PYRAMID = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4}
WAVES = {"conv_dim": [32, 32], "conv_stride": [5, 2], "conv_kernel": [10, 3]}

# Attributes of a config.
CONFIGS: dict[str, dict[str, Any]] = {
    "wav2vec2": WAVES,
    "wav2vec2-bert": {"vocab_size": 128, "feature_projection_input_dim": 16},
    "wav2vec2-conformer": {**WAVES, "vocab_size": 128},
    "sew": {"conv_dim": [32, 32], "conv_stride": [5, 2], "conv_kernel": [10, 3]},
    "sew-d": {"conv_dim": [32, 32], "conv_stride": [5, 2], "conv_kernel": [10, 3]},
    "qwen2_vl_text": {"rope_parameters": MROPE},
    "qwen2_5_vl_text": {"rope_parameters": MROPE},
    "glm4v_text": {"rope_parameters": MROPE},
    "glm4v_moe_text": {"rope_parameters": {**MROPE, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}},
    "glm_ocr_text": {"rope_parameters": MROPE},
    "glm_image_text": {"rope_parameters": MROPE},
    "glmga_text": {"rope_parameters": MROPE},
    "paddleocr_vl_text": {"rope_parameters": MROPE},
    "llama4_vision_model": {
        "projector_input_dim": 32,
        "projector_output_dim": 32,
        "vision_output_dim": 32,
        "intermediate_size": 128,
    },
    "llama4_text": {"intermediate_size_mlp": 64},
    "gemma3": {"mm_tokens_per_image": 4},
    "shieldgemma2": {"mm_tokens_per_image": 4},
    "efficientnet": {
        "hidden_dim": 640,
        "width_coefficient": 0.5,
        "depth_coefficient": 1.0,
        "in_channels": [32, 16],
        "out_channels": [16, 24],
        "kernel_sizes": [3, 3],
        "strides": [1, 2],
        "num_block_repeats": [1, 1],
        "expand_ratios": [1, 2],
    },
    "swin": PYRAMID,
    "swinv2": {**PYRAMID, "pretrained_window_sizes": [0, 0]},
    "swin2sr": {**PYRAMID, "window_size": 4, "embed_dim": 32, "num_heads": [4, 4]},
    "donut-swin": PYRAMID,
    "maskformer-swin": PYRAMID,
    "bit": {"embedding_size": 32, "hidden_sizes": [32, 64], "depths": [1, 1], "num_groups": 4},
    "levit": {
        "hidden_sizes": [16, 32, 64],
        "num_attention_heads": [2, 4, 8],
        "key_dim": [8, 8, 8],
        "patch_size": 16,
        "image_size": 128,
    },
    "mamba2": {"num_heads": 8, "head_dim": 8, "chunk_size": 8, "n_groups": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4},
    "lilt": {"hidden_size": 48, "max_2d_position_embeddings": 64},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "ministral": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_group": 1, "n_group": 1},
    "reformer": {
        "axial_pos_embds_dim": [16, 16],
        "axial_pos_shape": [4, 4],
        "lsh_attn_chunk_length": 4,
        "local_attn_chunk_length": 4,
        "num_buckets": 2,
        "is_decoder": False,
    },
    "esm": {"vocab_size": 128},
    "led": {"attention_window": [8, 8]},
    "longformer": {"attention_window": [8, 8]},
    "dinov3_vit": {"pos_embed_rescale": None, "pos_embed_jitter": None, "pos_embed_shift": None},  # drawn in training
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "dpt": {
        "num_hidden_layers": 4,
        "backbone_out_indices": [0, 1, 2, 3],
        "neck_hidden_sizes": [16, 16, 32, 32],
        "fusion_hidden_size": 16,
        "is_hybrid": False,
    },
    "lxmert": {"r_layers": 1, "l_layers": 1, "x_layers": 1, "visual_feat_dim": 32, "num_qa_labels": 16},
    "perceiver": {"num_latents": 8, "d_latents": 32, "num_blocks": 1, "num_self_attends_per_block": 2},
    "dac": {
        "encoder_hidden_size": 8,
        "decoder_hidden_size": 32,
        "downsampling_ratios": [2, 2],
        "upsampling_ratios": [2, 2],
        "n_codebooks": 2,
    },
    "xlm": {"emb_dim": 32},
    "flaubert": {"emb_dim": 32},
    "distilbert": {"dim": 32, "hidden_dim": 64},
    "gemma4_text": {"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 16},
    "janus_vqgan": {"base_channels": 32, "latent_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1},
    "dinov3_convnext": {"hidden_sizes": [8, 16, 32, 64], "depths": [1, 1, 1, 1]},
    "vits": {
        "flow_size": 32,
        "spectrogram_bins": 33,
        "upsample_initial_channel": 32,
        "upsample_rates": [2, 2],
        "upsample_kernel_sizes": [4, 4],
        "duration_predictor_filter_channels": 32,
        "wavenet_dilation_rate": 1,
    },
    # Batch norms of four values a channel, many after each other, would be too ill-conditioned to compare.
    "mobilenet_v1": {"image_size": 128, "depth_multiplier": 0.25},
    "mobilenet_v2": {"image_size": 128, "depth_multiplier": 0.25},
    "mgp-str": {"num_bpe_labels": 40, "num_wordpiece_labels": 40},
    "cpmant": {"dim_head": 8, "dim_ff": 64},
    "ctrl": {"dff": 64},
    "canine": {"num_hash_buckets": 128, "local_transformer_stride": 8, "downsampling_rate": 4},
}

# Sizes of inputs, or inputs that a model needs beside the usual.
# A mask that the model makes itself, but not when it is traced.
MASK = {"more": {"attention_mask": lambda m: m.ids(4, m.length) * 0 + 1}}

# Images or sounds are picked by a mask or cut by sizes read from a tensor, so that shapes depend on data: text alone.
TEXT = {"inputs": ["input_ids"]}
INPUTS: dict[str, dict[str, Any]] = {
    "longt5": MASK,
    "switch_transformers": MASK,
    "moonshine": {"samples": 2048},
    "xclip": {"frames": 8},
    "decision_transformer": {
        "inputs": {
            "states": lambda m: m.numbers(4, 8, 17),
            "actions": lambda m: m.numbers(4, 8, 4),
            "rewards": lambda m: m.numbers(4, 8, 1),
            "returns_to_go": lambda m: m.numbers(4, 8, 1),
            "timesteps": lambda m: m.ids(4, 8, high=32),
        }
    },
    "videoprism_vision_model": {"inputs": {"pixel_values_videos": lambda m: m.numbers(4, 16, 3, 32, 32)}},
    "vjepa2": {"inputs": {"pixel_values_videos": lambda m: m.numbers(4, 4, 3, 32, 32)}},
    "patchtst": {"inputs": {"past_values": lambda m: m.numbers(4, 32, 1)}},
    "patchtsmixer": {"inputs": {"past_values": lambda m: m.numbers(4, 32, 1)}},
    "lxmert": {
        "labels": None,
        "more": {"visual_feats": lambda m: m.numbers(4, 4, 32), "visual_pos": lambda m: m.numbers(4, 4, 4)},
    },
    "paligemma": {  # without types of tokens it attends to all that follows, but only when it is not traced
        "more": {"token_type_ids": lambda m: m.ids(4, m.length + sum(m.places.values()), high=2, low=0)}
    },
    "audioflamingo3": TEXT,
    "glmasr": TEXT,
    "moss_transcribe_diarize": TEXT,
    "musicflamingo": TEXT,
    "qwen3_omni_moe_thinker": TEXT,
    "vit_mae": {"more": {"noise": lambda m: torch.rand(4, 16, generator=m.generator)}},
    "idefics2": TEXT,
    "idefics3": TEXT,
    "smolvlm": TEXT,
    "modernvbert": TEXT,
    "ultravbert": TEXT,
    "dac": {"inputs": {"input_values": lambda m: m.numbers(4, 1, 64)}},
    "mllama": TEXT,
    "fuyu": TEXT,
    "llava_next": TEXT,
    "llava_next_video": TEXT,
    "llava_onevision": TEXT,
    "mistral3": TEXT,
    "lighton_ocr": TEXT,
    "idefics": {
        "inputs": {
            "input_ids": lambda m: m.ids(4, 16),
            "pixel_values": lambda m: m.numbers(4, 1, 3, 32, 32),
            "image_attention_mask": lambda m: m.ids(4, 16, 1) * 0 + 1,
        }
    },
    "pp_ocrv5_mobile_rec": {"image": 64},
    "musicgen": {"labels": None},
    "musicgen_melody": {"labels": None},
}

# Model types that are no rows, and why: there is nothing to train, or no config can be made without more.
LEFT_OUT: dict[str, str] = {
    "lightglue": "it is not made to be trained (it says so when it is given labels)",
}

# Model types that can't be captured as they are, and why: looked up in the source of the model.
AT_FAULT: dict[str, str] = {
    "fsmt": "branches on data: makes a mask only if there is padding (`if not padding_mask.any()`)",
    "glpn": "its loss picks pixels by a mask, so that sizes depend on data (`target[valid_mask]`)",
    "grounding-dino": "branches on data: clamps if something is not finite (`if not torch.isfinite(...).all()`)",
    "mm-grounding-dino": "branches on data: clamps if something is not finite (`if not torch.isfinite(...).all()`)",
    "higgs_audio_v2": "picks the tokens of sounds by a mask, so that sizes depend on data (`hidden_states[mask]`)",
    "idefics3_vision": "writes positions by a mask, so that sizes depend on data (`position_ids[mask] = ids[mask]`)",
    "smolvlm_vision": "writes positions by a mask, so that sizes depend on data (`position_ids[mask] = ids[mask]`)",
    "vits": "works on what a mask picks, so that sizes depend on data (`outputs[mask] = inputs[mask]`)",
    "ibert": "branches on data: rescales if a range is too small (`if self.x_min.min() > -1.1e-5`)",
    "jetmoe": "splits by the number of tokens of each expert, which it reads from a tensor (`expert_size.tolist()`)",
    "longcat_flash": "loops over the experts that were hit (`for expert_idx_tensor in expert_hit`)",
    "led": "reads overlapping windows from memory that is not in order (`hidden_states.as_strided(...)`)",
    "longformer": "branches on data: whether any token attends globally (`is_index_global_attn.any().item()`)",
    "reformer": "seeds itself from the operating system (`torch.seed()`), so that two runs on one device differ too",
    "switch_transformers": "replaces the weights of its router by a cast in every call "
    "(`self.classifier = self.classifier.to(self.dtype)`)",
    "udop": "picks patches of an image by the places of words, so that sizes depend on data (`zip(*ind)`)",
    "xmod": "sends tokens to the adapters of their languages by masks, so that sizes depend on data "
    "(`hidden_states[lang_mask]`)",
    "vilt": "resizes to a size that it reads from a mask (`interpolate(size=(h, w))` for `h, w in zip(x_h, x_w)`)",
}
