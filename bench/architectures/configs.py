"""A small config of any config class, by the names of its attributes.

Two layers, four heads of eight, a vocabulary of 128. The same small number for every name
that means the same thing keeps the relations between attributes, and between a config and
its parts: all widths are 32, so what has to be equal is. What names don't tell stands in
`exceptions.CONFIGS`, by model type, and a part of a config has a model type too.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from .exceptions import CONFIGS

WIDTH, INNER, LAYERS, HEADS, GROUPS, VOCABULARY, POSITIONS, IMAGE = 32, 64, 2, 4, 2, 128, 64, 32

# A pattern of names, and what becomes of a whole number that has such a name. The first that fits counts.
NUMBERS: tuple[tuple[str, Any], ...] = (
    (r"(type|position)_vocab_size", lambda n: n),
    (r"(vocab_size|num_embeddings|codebook_size|vocabulary_size)$", lambda n: min(n, VOCABULARY)),
    (r"num_(key_value|kv)_(heads|groups)|multi_query_group_num|num_kv_heads|n_head_kv", lambda n: min(n, GROUPS)),
    (r"^(.*_)?index_n_heads$", lambda n: min(n, 2)),
    (r"index_topk|^topk$", lambda n: min(n, 8)),
    (r"linear_num_(key)_heads", lambda n: min(n, GROUPS)),
    (r"(num_attention_heads|num_heads|n_heads?|attention_heads|num_head|n_attn_heads|num_value_heads)$",
     lambda n: min(n, HEADS)),
    (r"(qk_rope_head_dim|qk_nope_head_dim|v_head_dim|rotary_dim)$", lambda n: min(n, 8)),
    (r"head_(dim|size)$|^(d_kv|kv_channels)$", lambda n: min(n, 8) if n else n),
    (r"(kv|q|o)_lora_rank", lambda n: min(n, 16)),
    (r"(intermediate_size|ffn_dim|d_ff|d_inner|mlp_dim|ffn_hidden_size|n_inner|inner_dim|ffn_size|mlp_hidden_size|feed_forward_size|feedforward_dim|ff_dim|inner_size)$",
     lambda n: min(n, INNER) if n else n),
    (r"(num_hidden_layers|num_layers|n_layers?|_layers|layers_count|depth|num_blocks|num_mtp_layers|num_stack)$|^num_.*_layers$",
     lambda n: min(n, LAYERS)),
    (r"max_source_positions", lambda n: min(n, 32)),
    (r"(position_embeddings|positions|n_ctx|seq_len|seq_length|context_length|max_length|block_size|max_seqlen|max_target_length)$",
     lambda n: min(n, POSITIONS) if n > 0 else n),
    (r"^(image_size|input_size|img_size|pretrain_image_size)$", lambda n: min(n, IMAGE)),
    (r"^(patch_size|vision_patch_size)$", lambda n: min(n, 8)),
    (r"(sliding_window|attention_window|local_attention|attention_chunk_size)$", lambda n: min(n, 8)),
    (r"^window_size$", lambda n: min(n, 4)),
    (r"(num_experts_per_tok|moe_topk?|moe_k|top_k_experts|num_selected_experts|moe_top_k|experts_per_token)$",
     lambda n: min(n, 2)),
    (r"(num_experts|n_routed_experts|num_local_experts|moe_num_experts|num_routed_experts|num_moe_experts|expert_num)$",
     lambda n: min(n, 4)),
    (r"^(n_group|topk_group|num_expert_group)$", lambda n: 1),
    (r"first_k_dense_replace", lambda n: min(n, 1)),
    (r"(num_queries|num_query_tokens|num_latents|num_denoising)$", lambda n: min(n, 8)),
    (r"num_mel_bins|n_mels|feature_size|input_feat_per_channel", lambda n: min(n, 16)),
    (r"(mamba_n_heads|mamba_num_heads)$", lambda n: 8),
    (r"(mamba_d_head|mamba_head_dim)$", lambda n: 8),
    (r"(d_state|state_size|ssm_state_size|n_groups|mamba_n_groups)$", lambda n: min(n, 8)),
    (r"num_conv_pos_embeddings$", lambda n: min(n, 16)),
    (r"num_conv_pos_embedding_groups$", lambda n: min(n, 2)),
    (r"(hidden_size|d_model|n_embd|embed_dim|hidden_dim|embedding_size|embedding_dim|projection_dim|proj_dim|model_dim|d_embed|width|output_dim|out_dim|proj_size|_channels_dim|vision_dim|embed_size|output_size|entity_emb_size|hidden_channels|num_hidden_channels|token_dim|latent_dim|d_latents|bottleneck_size|conv_dim|lora_rank|fpn_hidden_size|word_embed_proj_dim)$",
     lambda n: min(n, WIDTH) if n > 0 else n),
)  # fmt: skip
SWITCHES = {"use_cache": False, "apply_spec_augment": False, "output_router_logits": False, "fast_init": False}
NOISE = re.compile(r"drop|jitter|mask_(time|feature)_prob|noise")
INDICES = re.compile(r"index(es)?$|indices$|_layers$|layers_pattern|layer_ids$")


class CannotBuild(Exception):
    """No small config or model could be made; the message says why."""


def small_config(config_class: type[Any], **more: Any) -> Any:
    """A small config of a class."""
    model_type = getattr(config_class, "model_type", "")
    chosen = {**CONFIGS.get(model_type, {}), **more}
    default = config_class() if "_parts" not in chosen else None
    parts = chosen.pop("_parts", None) or {
        name: type(getattr(default, name))
        for name in getattr(config_class, "sub_configs", {})
        if dataclasses.is_dataclass(getattr(default, name, None))
    }
    by_key: dict[str, Any] = {name: small_config(part) for name, part in parts.items()}
    for field in dataclasses.fields(config_class):
        if field.init and field.name not in by_key and (actual := _shrunk(field.name, _default_of(field))) is not None:
            by_key[field.name] = actual
    _keep_groups(config_class, by_key)
    by_key.update(chosen)
    _fix_tokens(config_class, by_key)
    config = config_class(**by_key)
    for name in ("pad_token_id", *(["decoder_start_token_id"] if getattr(config, "is_encoder_decoder", False) else [])):
        if getattr(config, name, None) is None:
            setattr(config, name, 0)
    return config


def _keep_groups(config_class: type[Any], settings: dict[str, Any]) -> None:
    """Where every head has its own keys by default, it has in small."""
    default = {field.name: _default_of(field) for field in dataclasses.fields(config_class)}
    heads, groups = default.get("num_attention_heads"), default.get("num_key_value_heads")
    if isinstance(heads, int) and heads == groups:
        settings["num_key_value_heads"] = settings.get("num_attention_heads", heads)


def _default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else None


def _shrunk(name: str, value: Any) -> Any:
    """The small value for an attribute, or None if its default is fine."""
    if name in SWITCHES:
        return SWITCHES[name]
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float) and NOISE.search(name):
        return type(value)(0)
    if isinstance(value, int):
        return _number(name, value)
    if isinstance(value, list | tuple) and value and all(isinstance(item, int) for item in value):
        return _list(name, list(value))
    if name == "layer_types" and isinstance(value, list | tuple):
        return list(value)[:LAYERS]
    if isinstance(value, list | tuple) and value and NOISE.search(name) and isinstance(value[0], float):
        return type(value)(0.0 for _ in value)
    return None


def _number(name: str, value: int) -> int | None:
    for pattern, small in NUMBERS:
        if re.search(pattern, name):
            actual: int = small(value)
            return actual if actual != value else None
    return None


def _list(name: str, value: list[int]) -> list[int] | None:
    """Sizes of a pyramid keep their steps; depths become one; indices of layers stay inside."""
    if re.search(r"depths|^depth$|layer_repeats|num_layers|num_hidden_layers|blocks", name):
        return [1] * len(value)
    if re.search(r"(image|img|input)_size", name):
        return [min(item, IMAGE) for item in value]
    if re.search(r"conv_dim", name):
        return [WIDTH] * len(value)
    if re.search(r"hidden_sizes|embed_dims?|channels|dims$|widths|planes|neck", name) and max(value) > 64:
        return [max(8, 8 * round(WIDTH * item / min(value) / 8)) // (2 if len(value) > 4 else 1) for item in value]
    if INDICES.search(name):
        return sorted({min(item, LAYERS - 1) for item in value})
    return None


def _fix_tokens(config_class: type[Any], settings: dict[str, Any]) -> None:
    """Ids of special tokens below the vocabulary, each its own."""
    size = settings.get("vocab_size") or getattr(settings.get("text_config"), "vocab_size", VOCABULARY)
    free = iter(range(min(size, VOCABULARY) - 1, 0, -1))
    for field in dataclasses.fields(config_class):
        name, value = field.name, settings.get(field.name, _default_of(field))
        if not re.search(r"(token|tok)_?(id|index)$|_token_ids$", name):
            continue
        every = value if isinstance(value, list | tuple) else (value,)
        if any(isinstance(value, int) and value >= min(size, VOCABULARY) - 20 for value in every):
            settings[name] = next(free)
