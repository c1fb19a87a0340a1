"""What `TrainingArguments` may say and the Trainer can't do with a compiled model: refused by name, all at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import InputError, raise_all

REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "deepspeed": (bool, 'it shards the model by itself; leave it out and use plan="zero3=N" (or zero1, zero2)'),
    "fsdp": (bool, 'it shards the model by itself; leave it out and use plan="zero3=N"'),
    "parallelism_config": (bool, 'the plan says how ranks share the work: plan="dp=2,tp=2", "cp=2", ...'),
    "torch_compile": (bool, "the model is compiled already; leave it out"),
    "auto_find_batch_size": (bool, "every try would be another compilation; choose the batch size"),
    "activation_checkpointing": (bool, 'add recompute to the plan: plan="dp=2,recompute"; "auto" decides by itself'),
    "fp16": (bool, "its loss scaler is not connected to the shards; use bf16=True, or sw.Trainer with fp16-mixed"),
    "fp16_full_eval": (bool, "a compiled model can't be cast; leave it out"),
    "bf16_full_eval": (bool, "a compiled model can't be cast; use bf16=True"),
    "use_liger_kernel": (bool, "its kernels can't be captured; leave it out"),
    "neftune_noise_alpha": (lambda value: value is not None, "its noise would not be that of one device; leave it out"),
    "debug": (bool, "it needs hooks inside of the model; see docs/faults.md for NaN and infinity"),
    "enable_jit_checkpoint": (bool, "ranks would see its signal at different steps; use save_steps and --max-restarts"),
    "save_on_each_node": (bool, "ranks write one checkpoint together, to a folder that all nodes share; leave it out"),
    "optim": (
        lambda value: any(
            name in str(getattr(value, "value", value)) for name in ("lomo", "galore", "apollo", "schedule_free")
        ),
        "it does more than its step says, during backward, between steps or to whole matrices; use one of torch.optim",
    ),
}
"""The name of an argument, when it is meant, and why not, with what to do instead."""

OPTIONS = ("cluster", "memory", "constraints", "seed", "pipeline", "compile")
"""The arguments of `sw.parallelize` that are left to the user. The others follow from the Trainer's own."""


def check_arguments(args: Any, options: Mapping[str, Any]) -> None:
    """Refuse arguments of a run that can't be honoured."""
    faults = [
        f"{name}={getattr(args, name)!r}: {why}"
        for name, (is_set, why) in REFUSED.items()
        if hasattr(args, name) and is_set(getattr(args, name))
    ]
    if args.push_to_hub and args.hub_strategy != "end" and not args.save_only_model:
        faults.append(
            f"hub_strategy={args.hub_strategy.value!r}: checkpoints have no model.safetensors that could be uploaded; "
            'use hub_strategy="end" and trainer.push_to_hub(), or save_only_model=True'
        )
    if getattr(args.accelerator_config, "dispatch_batches", None):
        faults.append("accelerator_config dispatch_batches=True: every rank loads the batch by itself; leave it out")
    faults += [
        f"options[{name!r}]: it follows from plan=, from the TrainingArguments or from how the Trainer calls the "
        f"model; leave it out (options are {', '.join(OPTIONS)})"
        for name in options
        if name not in OPTIONS
    ]
    raise_all(InputError, "shardwright.huggingface.Trainer can't follow these arguments:", faults)
