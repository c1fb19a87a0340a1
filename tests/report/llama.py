"""A model that is worth splitting: two layers of a Llama, on meta."""

import torch
import transformers


def llama():
    config = transformers.LlamaConfig(
        vocab_size=8192, hidden_size=2048, intermediate_size=4096, num_hidden_layers=2, num_attention_heads=16,
        num_key_value_heads=8, max_position_embeddings=1024,
    )  # fmt: skip
    with torch.device("meta"):
        module = transformers.LlamaForCausalLM(config)
    ids = torch.zeros(8, 1024, dtype=torch.int64)
    return module.train(), ((ids,), {"labels": ids.clone(), "use_cache": False})
