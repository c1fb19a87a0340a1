"""A digest that two tensors share only if they have the same bits, computed on the tensor's device.

The bits are read as 32-bit words w[r, c], in rows of a fixed width, and multiplied by pseudo-random weights:
sum over r of u[r] * (sum over c of v[c] * w[r, c]), modulo 2**64. The weights depend on the position, so samples in
another order have another digest. Nothing is copied to the host, and integer arithmetic is exact on every device. It
detects mistakes; it is not a cryptographic hash.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

WIDTH = 4096  # words of a row
ROWS_AT_ONCE = 1024  # rows at a time: 32 MiB of products


@torch.no_grad()
def tensor_digest(tensor: Tensor) -> Tensor:
    """The digest of a tensor's values as one int64 on its device; shape and dtype are not in it."""
    if tensor.layout != torch.strided:
        parts = [tensor_digest(part) for part in _parts(tensor)]
        return (torch.stack(parts) * weights(len(parts), tensor.device)).sum()
    values = _as_int32(tensor)
    full_rows = values.numel() // WIDTH
    columns, rest = weights(WIDTH, values.device), values[full_rows * WIDTH :]
    total = (rest * columns[: rest.numel()]).sum()
    if full_rows:
        matrix = values[: full_rows * WIDTH].view(full_rows, WIDTH)
        sums = torch.cat([(part * columns).sum(1) for part in torch.split(matrix, ROWS_AT_ONCE)])
        total += (sums * weights(full_rows, values.device)).sum()
    return total


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The dense components of a sparse tensor."""
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor.to_dense(),)


def _as_int32(tensor: Tensor) -> Tensor:
    """The bits of a tensor as flat int32, padded with zeros."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    plain = (torch.view_as_real(plain) if plain.is_complex() else plain).contiguous()
    plain = plain.as_strided((plain.numel(),), (1,))  # a single element may have any stride
    size = plain.element_size()
    if (plain.numel() * size) % 4 or (plain.storage_offset() * size) % 4:
        octets = plain.view(torch.uint8)
        plain = octets.new_zeros(-(-octets.numel() // 4) * 4)
        plain[: octets.numel()] = octets
    return plain.view(torch.int32)


@functools.cache
def weights(count: int, device: torch.device) -> Tensor:
    """`count` pseudo-random 64-bit numbers, the same on every device and in every process."""
    mixed = torch.arange(1, count + 1, dtype=torch.int64, device=device) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        mixed = (mixed ^ (mixed >> shift)) * factor
    return mixed ^ (mixed >> 31)
