"""Hugging Face models from small configs: two layers, no dropout, nothing downloaded.

transformers is imported when a model is built, so that the rest of the zoo does not wait for it.
"""

from torch import nn


def llama(vocab: int, d: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab,
            hidden_size=d,
            intermediate_size=2 * d,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
    )


def gpt2(vocab: int, d: int, seq: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocab,
            n_positions=seq,
            n_embd=d,
            n_layer=2,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def bert(vocab: int, d: int, seq: int) -> nn.Module:
    from transformers import BertConfig, BertForPreTraining

    return BertForPreTraining(
        BertConfig(
            vocab_size=vocab,
            hidden_size=d,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=2 * d,
            max_position_embeddings=seq,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def t5(vocab: int, d: int) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=vocab,
            d_model=d,
            d_kv=d // 4,
            d_ff=2 * d,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )


def vit(d: int, labels: int) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=d,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=2 * d,
            image_size=16,
            patch_size=4,
            num_labels=labels,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )
