"""The runs whose throughput was published, as rows of one kind. The tables are not part of the project."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

FILES = ("published_fsdp.csv", "published_scaling.csv", "published_more.csv")

ASSUMED_MICROBATCH = 4
"""Megatron's microbatch in published_scaling.csv, which was not published."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A run that was published.

    arch        mpt, megatron (a GPT), llama, or the name of a mixture of experts
    dp          replicas of the model, and those that share its parameters for storage
    zero        how they are stored: 0, 1, 3, or "hsdp" (sharded inside of a node, replicated between nodes)
    virtual     virtual stages per pipeline rank
    recompute   none, full, selective (half of what a layer computes), attention (its scores), or a part of the layers
    compiled    by torch.compile, which fuses kernels that are priced one by one
    tokens      a second and GPU
    unpriced    why there is no plan for it; empty if there is
    """

    family: str
    arch: str
    model: str
    cluster: str
    gpus: int
    d: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq: int
    dp: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1
    virtual: int = 1
    zero: str = "0"
    sp: bool = False
    microbatch: int = 1
    batch: int = 1
    recompute: str = "none"
    compiled: bool = False
    experts: int = 0
    picked: int = 0
    tokens: float = 0.0
    unpriced: str = ""

    @property
    def accumulate(self) -> int:
        """Microbatches of a step on each replica."""
        return max(1, self.batch // self.dp // self.microbatch)


def read(tables: Path) -> list[Row]:
    readers = (_fsdp, _scaling, _more)
    rows = []
    for name, reader in zip(FILES, readers, strict=True):
        with open(tables / name, newline="") as file:
            rows += [reader(line) for line in csv.DictReader(file)]
    return list(_with_time(rows))


def _with_time(rows: list[Row]) -> Iterator[Row]:
    """Rows of runs that went out of memory have no time."""
    yield from (row for row in rows if row.tokens)


def _fsdp(line: dict[str, str]) -> Row:
    gpus, d, heads = int(line["gpus"]), int(line["d_model"]), int(line["heads"])
    gpu = "A100-80GB" if line["gpu"].startswith("a100") else "H100"
    return Row(
        family=f"llm-foundry {gpu.split('-')[0]}", arch="mpt", model=line["model"], cluster=f"{gpus}x{gpu}", gpus=gpus,
        d=d, layers=int(line["layers"]), heads=heads, kv_heads=heads, ffn=4 * d, vocab=int(line["vocab"]),
        seq=int(line["seq"]), dp=gpus, zero="3", microbatch=int(line["microbatch"]), batch=int(line["global_batch"]),
        recompute=line["recompute"], tokens=float(line["tokens_per_s_per_gpu"]),
    )  # fmt: skip


def _scaling(line: dict[str, str]) -> Row:
    titan = line["source"].startswith("torchtitan")
    gpus, batch, sharded = int(line["gpus"]), int(line["global_batch"]), int(line["zero3"])
    dp, pp, layers = int(line["dp"]) * max(1, sharded), int(line["pp"]), int(line["layers"])
    row = Row(
        family="torchtitan" if titan else "megatron 2021", arch="llama" if titan else "megatron", model=line["model"],
        cluster=f"{gpus}x{'H100' if titan else 'A100-80GB'}", gpus=gpus, d=int(line["d_model"]), layers=layers,
        heads=int(line["heads"]), kv_heads=int(line["kv_heads"]), ffn=int(line["ffn"]), vocab=int(line["vocab"]),
        seq=int(line["seq"]), dp=dp, tp=int(line["tp"]), pp=pp, zero="3" if sharded else "0",
        # how many virtual stages a rank had was not published: as few as interleaving needs
        virtual=next((n for n in range(2, layers) if layers // pp % n == 0), 1) if pp > 1 else 1,
        microbatch=int(line["microbatch"] or min(ASSUMED_MICROBATCH, batch // dp)), batch=batch,
        recompute=line["recompute"], compiled=line["compiled"] == "yes",
        tokens=float(line["tokens_per_s_per_gpu"] or 0),
    )  # fmt: skip
    if row.tokens:
        return row
    # Megatron counts flops as 96 B s l h^2 (1 + s/(6h) + V/(16lh)), with the recomputed forward
    each = 96 * row.layers * row.d**2 * (1 + row.seq / (6 * row.d) + row.vocab / (16 * row.layers * row.d))
    return replace(row, tokens=float(line["tflops_per_gpu"]) * 1e12 / each)


def _more(line: dict[str, str]) -> Row:
    def number(name: str, otherwise: int = 0) -> int:
        return int(line[name]) if line[name] else otherwise

    recompute = {"?": "none", "0": "none", "1.0": "full"}.get(line["recompute"], line["recompute"])
    return Row(
        family=line["family"], arch=line["arch"], model=line["model"], cluster=line["cluster"], gpus=int(line["gpus"]),
        d=number("d"), layers=number("layers"), heads=number("heads"), kv_heads=number("kv"), ffn=number("ffn"),
        vocab=number("vocab"), seq=int(line["seq"]), dp=number("dp", 1), tp=number("tp", 1), pp=number("pp", 1),
        ep=number("ep", 1), cp=number("cp", 1), virtual=number("vp", 1), zero=line["zero"] or "0", sp=line["sp"] == "1",
        microbatch=number("mbs", 1), batch=number("gbs", 1), recompute=recompute, compiled=line["compiled"] == "1",
        experts=number("experts"), picked=number("topk"), tokens=float(line["tokens_s_gpu"] or 0),
        unpriced=line["why_not"],
    )  # fmt: skip
