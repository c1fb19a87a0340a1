"""What the server that tests fork their processes from imports once, instead of every process: seconds each."""

import gc

import torch._dynamo
import torch.distributed  # noqa: F401
from transformers import BertForPreTraining, GPT2LMHeadModel, LlamaForCausalLM, T5ForConditionalGeneration  # noqa: F401

import shardwright
import shardwright.lightning

for name in shardwright.__all__:
    getattr(shardwright, name)  # each is imported when it is first used


gc.freeze()  # what is imported stays: no collection has to walk it
