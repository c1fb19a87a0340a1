"""Train a Llama of the third generation under any plan, on documents packed into sequences.

    torchrun --standalone --nproc-per-node=2 examples/llama3_demo.py --plan zero3=2
    torchrun --standalone --nproc-per-node=8 examples/llama3_demo.py --model path/to/Llama-3.2-1B --plan auto

Without --model it is a small one over characters. A folder with a config alone is trained from the start; its
weights and its tokenizer are used if it has them. Shows a `sw.Trainer` with packed documents: docs/llama3_demo.md.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedConfig
from transformers import get_cosine_schedule_with_warmup as cosine

import shardwright as sw
from shardwright.data import Packing
from shardwright.huggingface import empty_model
from shardwright.train import LoaderOptions, LoggingOptions, OptimizationOptions, ValidationOptions
from shardwright.train.loggers import ConsoleLogger, CSVLogger
from text import DATA, Characters


def small_config(vocabulary: int, seq: int) -> PreTrainedConfig:
    """Llama 3 in small: grouped heads, its rotary base, an untied head."""
    return LlamaConfig(
        vocab_size=vocabulary, hidden_size=128, intermediate_size=448, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=seq, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )  # fmt: skip


def load(folder: Path | None, seq: int) -> tuple[PreTrainedConfig, list[Any], bool]:
    """The config, the text as documents of its tokens, and whether the folder has weights."""
    text = Characters(DATA)
    if folder is not None and any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        documents: list[Any] = [tokenizer(passage)["input_ids"] for passage in text.passages()]
    else:
        documents = [text.encode(passage) for passage in text.passages()]
    config = small_config(len(text.alphabet), seq) if folder is None else AutoConfig.from_pretrained(folder)
    return config, documents, folder is not None and any(folder.glob("*.safetensors"))


def make_model(config: PreTrainedConfig, weights: bool, seed: int) -> nn.Module:
    config.use_cache = False  # with a cache transformers would let attention cross documents
    if weights:
        return empty_model(config)  # each rank reads its shards
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config)


def main(argv: list[str] | None = None) -> sw.Trainer:
    """Returns the trainer after its run."""
    args = parse(argv)
    folder = None if args.model is None else Path(args.model)
    config, documents, weights = load(folder, args.seq)
    held_out = len(documents) // 20
    trainer = sw.Trainer(
        model=make_model(config, weights, args.seed),
        weights=folder if weights and args.resume is None else None,
        train_data=documents[held_out:],
        val_data=documents[:held_out],
        loader=LoaderOptions(packing=Packing(length=args.seq, shift_labels=False, vocab_size=config.vocab_size)),
        batch_size=args.batch,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1),
        scheduler=lambda optimizer: cosine(optimizer, args.warmup, args.steps),
        optimization=OptimizationOptions(reduction="token", accumulate=args.accumulate, clip_norm=1.0),
        validation=ValidationOptions(every=args.steps),
        max_steps=args.steps,
        plan=args.plan,
        precision=args.precision,
        seed=args.seed,
        directory=args.out,
        resume=args.resume,
        logging=LoggingOptions(loggers=[ConsoleLogger(), CSVLogger()], every=args.log_every),
    )
    trainer.fit()
    return trainer


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder with config.json, and maybe safetensors and a tokenizer")
    parser.add_argument("--plan", default="auto", help="for example dp=2, tp=2, zero3=2, pp=2, auto")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16, help="sequences of an update, over all ranks")
    parser.add_argument("--accumulate", type=int, default=1, help="calls of the model for an update")
    parser.add_argument("--seq", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--precision", help="such as bf16-mixed")
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume", help="last, best, or the path of a checkpoint")
    parser.add_argument("--out", default=str(Path(tempfile.gettempdir()) / "shardwright-llama3"))
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
