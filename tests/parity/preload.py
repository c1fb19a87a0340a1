"""What the server that pools fork from imports once, instead of every process: about 20 s each otherwise."""

import torch._dynamo
import torch.distributed
import torch.distributed.checkpoint
import torch.export
import transformers
from transformers.models.bert import modeling_bert
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.llama import modeling_llama
from transformers.models.t5 import modeling_t5
from transformers.models.vit import modeling_vit

import shardwright.compile
import shardwright.parallelize
import tests.models.zoo

__all__ = [
    "modeling_bert",
    "modeling_gpt2",
    "modeling_llama",
    "modeling_t5",
    "modeling_vit",
    "shardwright",
    "tests",
    "torch",
    "transformers",
]
