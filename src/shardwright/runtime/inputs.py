"""What is passed to a compiled model, and what that means: the three input modes.

    mode      every rank passes                     the program starts from
    -------   -----------------------------------   ------------------------
    same      the global batch                      the global batch
    rows      the rows of its data-parallel group   those rows
    gather    rows of its own                       all rows, gathered

The first step compares hashes of the inputs, because a loop that does not match its mode
would train on wrong data without a sign.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.errors import InputError, raise_all

from . import journal, roll_call
from .faults import watch

Mode = Literal["same", "rows", "gather"]


def digest(tensors: Sequence[Tensor]) -> int:
    """A number that two lists of tensors share only if they are the same."""
    held = hashlib.blake2b(digest_size=7)
    for tensor in tensors:
        held.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
        plain = tensor.detach().cpu().contiguous().reshape(-1)
        held.update(plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
    return int.from_bytes(held.digest(), "big")


def check_mode(mode: Mode, tensors: Sequence[Tensor], replicas: Sequence[Sequence[int]]) -> None:
    """Refuse inputs that do not fit their mode. `replicas` lists the ranks of each data-parallel group."""
    if not dist.is_initialized() or not tensors:
        return
    size = dist.get_world_size()
    found = roll_call.numbers(digest(tensors), "a hash of the inputs of every rank")
    if mode == "same" and len(set(found)) > 1:
        odd = next(rank for rank in range(size) if found[rank] != found[0])
        raise InputError(
            f'inputs="same" means that every rank passes the same global batch, but rank {odd} passes another '
            f'batch than rank 0; pass the same data everywhere, or say inputs="rows" (each data-parallel group its own '
            'rows) or inputs="gather" (each rank its own rows)'
        )
    if mode == "rows":
        for ranks in replicas:
            if len({found[rank] for rank in ranks}) > 1:
                raise InputError(
                    f'inputs="rows" means that the ranks {list(ranks)} pass the same rows, since they hold parts of '
                    "one replica, but theirs differ; sample by model.data_rank, not by the rank"
                )
        if len(replicas) > 1 and len({found[ranks[0]] for ranks in replicas}) == 1:
            raise InputError(
                'inputs="rows" means that each data-parallel group passes its own rows, but all groups pass the same; '
                'use model.data_rank and model.data_size in the sampler, or say inputs="same"'
            )


def check_shapes(shapes: Sequence[tuple[int, ...]], about: str = "") -> None:
    """All ranks must call with the same shapes. Called by a rank for shapes that are new to it."""
    if not dist.is_initialized() or dist.get_world_size() < 2:
        return
    mine = str([list(shape) for shape in shapes])
    watched = watch()
    if watched is not None:
        said = watched.agree(mine, about)
    else:  # ranks that are threads
        number = roll_call.number_of(mine)
        found = roll_call.numbers(number, "a hash of the shapes of every rank")
        said = {rank: mine if held == number else "other shapes" for rank, held in enumerate(found)}
    every = {rank: said.get(rank, "shapes that it has passed before") for rank in range(dist.get_world_size())}
    if len(set(every.values())) > 1:
        other = next(rank for rank, held in every.items() if held != mine)
        raise InputError(
            f"the ranks pass inputs of different shapes: rank {dist.get_rank()} passes {mine}, rank {other} passes "
            f"{every[other]}; pass the same shapes everywhere, a smaller last batch too, or drop it (drop_last=True)"
        )


def check_dtypes(names: Sequence[str], known: Sequence[torch.dtype], given: Sequence[torch.dtype]) -> None:
    """A call must pass the dtypes it was compiled for: another one is a slip in the data far more often than a wish."""
    faults = [
        f"{name} is {_short(now)}, and the model was compiled for {_short(then)}; pass {name}.to({then})"
        for name, then, now in zip(names, known, given, strict=True)
        if then != now
    ]
    raise_all(InputError, "the data has another dtype than the example:", faults)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def gather_rows(tensor: Tensor, batch: int | None) -> Tensor:
    """The rows of all ranks, in the order of ranks; what has no rows is passed on."""
    if not dist.is_initialized() or batch is None or tensor.dim() == 0 or tensor.shape[0] != batch:
        return tensor
    size = dist.get_world_size()
    plain = tensor.detach().contiguous()
    sent = plain.view(torch.uint8) if plain.dtype == torch.bool else plain
    every = sent.new_empty((size * sent.shape[0], *sent.shape[1:]))
    journal.enter("all_gather", None, "the rows of every rank")
    dist.all_gather_single(every, sent)
    return every.view(plain.dtype) if plain.dtype == torch.bool else every


def rows_of(tensors: Sequence[Tensor]) -> int | None:
    """The common size of dim 0, if there is one."""
    sizes = {tensor.shape[0] for tensor in tensors if tensor.dim() > 0}
    return sizes.pop() if len(sizes) == 1 else None
