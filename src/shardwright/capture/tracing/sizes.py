"""Sizes that are given as tensors, while a model is traced.

Where a tensor that is known (constant_values.py: it depends on no input) decides how large a result is, the result
has a fixed size:

    x[:, keep]                      an index by the places where the mask `keep` is true
    torch.nonzero(keep)             those places, as a constant
    repeat_interleave(x, counts)    an index by row numbers
    tensor_split(x, ends)           slices

`narrow` by a start that is a tensor has a fixed size anyhow, and is an index from there on. `torch.cov` and
`corrcoef` look at values only to check them, and are written out. `histogramdd` is the
two ops that it is made of. `equal` and `allclose` give a number (python_numbers.py),
which may be returned and decides nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from .constant_values import ConstantValues
from .ctc_loss import ctc_loss

_COUNTED = frozenset({
    "nonzero", "argwhere", "unique", "unique_consecutive", "masked_select", "bincount", "one_hot",
})  # fmt: skip


class KnownSizes(TorchFunctionMode):
    """Within this, sizes may be given by tensors that are known."""

    def __init__(self, known: ConstantValues) -> None:
        super().__init__()
        self.known = known
        self.forms: dict[str, Callable[..., Any]] = {
            "__getitem__": self._index, "masked_select": self._masked_select, "tensor_split": self._tensor_split,
            "repeat_interleave": self._repeat_interleave, "narrow": _narrow, "cov": _cov, "corrcoef": _corrcoef,
            "equal": self._equal, "allclose": self._allclose, "ctc_loss": ctc_loss, "histogramdd": _histogramdd,
            "combinations": _combinations,
        }  # fmt: skip

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():  # cond and scan are captured by dynamo, which would look in here
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _COUNTED or (name == "where" and len(args) == 1 and not kwargs):
            tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            if tensors and all(self.known.knows(leaf) for leaf in tensors):
                return self.known.run(func, args, kwargs)
        if name in self.forms:
            result = self.forms[name](*args, **kwargs)
            if result is not None:
                return result
        return func(*args, **kwargs)

    def _index(self, x: Tensor, index: Any) -> Tensor | None:
        items = index if isinstance(index, tuple) else (index,)
        masks = [item for item in items if isinstance(item, Tensor) and item.dtype is torch.bool and item.dim()]
        if not masks or not all(self.known.knows(mask) for mask in masks):
            return None
        indices: list[Any] = []
        for item in items:
            places = self._places(item) if any(item is mask for mask in masks) else (item,)
            indices += places
        return x[tuple(indices)]

    def _masked_select(self, x: Tensor, mask: Tensor) -> Tensor | None:
        return x[self._places(mask)] if x.shape == mask.shape and self.known.knows(mask) else None

    def _tensor_split(self, x: Tensor, indices: Any = None, dim: int = 0, **options: Any) -> Any:
        boundaries = options.get("tensor_indices_or_sections", indices)
        if not isinstance(boundaries, Tensor) or not self.known.knows(boundaries):
            return None
        return torch.tensor_split(x, self.known.run(Tensor.tolist, (boundaries,), {}), dim)

    def _repeat_interleave(
        self, x: Tensor, repeats: Any = None, dim: int | None = None, output_size: int | None = None
    ) -> Tensor | None:
        if not isinstance(repeats, Tensor) or not self.known.knows(repeats):
            return None
        x, dim = (x.reshape(-1), 0) if dim is None else (x, dim)

        def indices(counts: Tensor) -> Tensor:
            return torch.arange(x.shape[dim]).repeat_interleave(counts)

        return x.index_select(dim, self.known.run(indices, (repeats,), {}))

    def _equal(self, x: Tensor, other: Tensor) -> Any:
        if x.dtype is not other.dtype or self._know(x, other):
            return None
        return (x == other).all().item() if x.shape == other.shape else False

    def _allclose(self, x: Tensor, other: Tensor, *limits: Any, **named: Any) -> Any:
        return None if self._know(x, other) else torch.isclose(x, other, *limits, **named).all().item()

    def _know(self, *tensors: Tensor) -> bool:
        return all(self.known.knows(tensor) for tensor in tensors)

    def _places(self, mask: Tensor) -> tuple[Tensor, ...]:
        places: tuple[Tensor, ...] = self.known.run(lambda tensor: tensor.nonzero(as_tuple=True), (mask,), {})
        return places


def _narrow(x: Tensor, dim: int, start: Any, length: int) -> Tensor | None:
    if not isinstance(start, Tensor):
        return None
    start = torch.where(start < 0, start + x.shape[dim], start)
    return x.index_select(dim, start.reshape(()) + torch.arange(length, device=x.device))


def _combinations(x: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    """Which elements go together depends on their number alone."""
    choose = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    places = torch.tensor(list(choose(range(x.shape[0]), r)), dtype=torch.long)
    return x[places.reshape(-1, r)] if r else x.new_empty(0)


def _histogramdd(
    x: Tensor, bins: Any, range: Any = None, weight: Tensor | None = None, density: bool = False
) -> Any:  # fmt: skip
    """It is two ops for torch; together they return a list and a tensor, which a graph can't represent."""
    aten: Any = torch.ops.aten
    if isinstance(bins, list | tuple) and all(isinstance(edge, Tensor) for edge in bins):
        histogram = aten._histogramdd_from_bin_tensors(x, bins, weight=weight, density=density)
        return torch.return_types.histogramdd((histogram, tuple(bins)))
    counts = [bins] * x.shape[-1] if isinstance(bins, int) else list(bins)
    options = {"range": range, "weight": weight, "density": density}
    edges = aten._histogramdd_bin_edges(x, counts, **options)
    return torch.return_types.histogramdd((aten._histogramdd_from_bin_cts(x, counts, **options), tuple(edges)))


def _cov(
    x: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor | None:
    """Without `aweights`, whose gradient would be rounded in another order than torch's."""
    if x.dim() > 2 or x.dtype is torch.bool or aweights is not None:
        return None
    variables = x.unsqueeze(0) if x.dim() < 2 else x
    if fweights is None:
        count = variables.shape[1]
        centered = variables - (variables.sum(1) / count).unsqueeze(1)
        return (centered @ centered.t().conj() / max(count - correction, 0)).squeeze()
    total = fweights.sum()
    centered = variables - ((variables * fweights).sum(1) / total).unsqueeze(1)
    return (centered @ (centered * fweights).t().conj() / (total - correction).clamp_min(0)).squeeze()


def _corrcoef(x: Tensor) -> Tensor | None:
    covariance = _cov(x)
    if covariance is None or covariance.is_complex():
        return None
    if covariance.dim() == 0:
        return covariance / covariance
    deviations = covariance.diag().sqrt()
    return (covariance / deviations.view(-1, 1) / deviations.view(1, -1)).clip(-1, 1)
