"""What the process that trials are forked from imports once: all that is slow, and nothing of the package."""

from __future__ import annotations

import gc
import os


def preload() -> None:
    """Import what most tests import; a fork has none of the threads that OpenMP would wait for."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import torch._dynamo
    import torch.distributed
    import torch.distributed.tensor
    import torch.testing._internal.distributed.multi_threaded_pg  # noqa: F401
    from transformers import BertForPreTraining, GPT2LMHeadModel, LlamaForCausalLM  # noqa: F401

    gc.freeze()  # what is imported stays: no collection has to walk it
