"""A model run once on a real example, to see what its opaque submodules take and return.

Nothing of the model is changed: a copy runs, which shares the parameters and has buffers and
Python attributes of its own, without gradients and with its own random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from ...errors import CaptureError
from ..copies import copy_module

Real = Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]
"""A module with values and arguments with values, for the call that is captured."""

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


class NoValues(CaptureError):
    """The model can't be run: its parameters or its example are on meta."""


@dataclass(frozen=True, slots=True)
class ObservedCall:
    """One call of an opaque submodule on real data."""

    part: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    buffers: Mapping[str, Tensor]
    written: Mapping[str, Tensor]  # the buffers that this call wrote to; on other data it may be others


def observe_calls(real: Real, skeleton: nn.Module, paths: Iterable[str]) -> dict[str, list[ObservedCall]]:
    """Run the real model and look at some submodules. Its parts train or not as those of the skeleton do."""
    module, args, kwargs = real()
    if has_no_values([*module.parameters(), *module.buffers(), *pytree.tree_leaves((args, kwargs))]):
        raise NoValues(
            f"what {', '.join(paths)} returns can only be seen by running the model, and its parameters or its "
            "example are on meta or fake; pass a model and an example with values"
        )
    copied = copy_module(module, {id(parameter): parameter for parameter in module.parameters()})
    for copy, like in zip(copied.modules(), skeleton.modules(), strict=True):
        copy.training = like.training
    calls: dict[str, list[ObservedCall]] = {path: [] for path in paths}

    def looking(path: str, part: nn.Module) -> None:
        versions: dict[str, tuple[int, int]] = {}
        argument_versions: list[int] = []

        def before(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            versions.update({name: (id(copy), copy._version) for name, copy in part.named_buffers()})
            argument_versions[:] = _versions((args, kwargs))

        def after(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            buffers = dict(part.named_buffers())
            if _versions((args, kwargs)) != argument_versions:
                raise refusal(path, "it changes one of its arguments in place", "Write x = x + 1 instead of x += 1")
            written = {name: x for name, x in buffers.items() if versions.get(name) != (id(x), x._version)}
            calls[path].append(ObservedCall(part, args, kwargs, result, buffers, written))

        part.register_forward_pre_hook(before, with_kwargs=True)
        part.register_forward_hook(after, prepend=True, with_kwargs=True)

    for path in calls:
        looking(path, copied.get_submodule(path))
    with torch.no_grad(), torch.random.fork_rng():
        copied(*args, **kwargs)
    for path, every in calls.items():
        if not every:
            raise refusal(path, "it was not called when the model ran on its example", "Call it, not its forward")
    return calls


def refusal(path: str, what: str, remedy: str) -> CaptureError:
    """Why a submodule can't be opaque."""
    return CaptureError(f"{path or 'the model'} can't be opaque: {what}. {remedy}.", path=path)


def _versions(tree: Any) -> list[int]:
    return [leaf._version for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def has_no_values(leaves: Iterable[Any]) -> bool:
    return any(isinstance(leaf, Tensor) and (leaf.is_meta or isinstance(leaf, FakeTensor)) for leaf in leaves)


def check_rows(path: str, seen: ObservedCall) -> str:
    """Refuse a submodule that claims independent samples and returns something else for a batch in two parts.

    Returns a note if that can't be checked.
    """
    leaves, spec = pytree.tree_flatten((seen.args, seen.kwargs))
    batch = next(leaf.shape[0] for leaf in pytree.tree_leaves(seen.result) if isinstance(leaf, Tensor))
    mixes = [torch.randn_like(x) for x in pytree.tree_leaves(seen.result) if isinstance(x, Tensor) and _floats(x)]

    def run(start: int, end: int, seed: int = 0) -> list[list[Tensor]]:
        """Outputs, gradients of batched inputs, gradients that are sums over the batch."""
        shard = [leaf[start:end] if _has_rows(leaf, batch) else leaf for leaf in leaves]
        shard = [leaf.detach().requires_grad_() if _floats(leaf) else leaf for leaf in shard]
        args, kwargs = pytree.tree_unflatten(shard, spec)
        with torch.enable_grad(), torch.random.fork_rng():
            torch.manual_seed(seed)
            outputs = [x for x in pytree.tree_leaves(seen.part.forward(*args, **kwargs)) if isinstance(x, Tensor)]
            floats = [x for x in outputs if x.is_floating_point()]
            total = sum((x * mix[start:end]).sum() for x, mix in zip(floats, mixes, strict=True) if x.requires_grad)
            own = [leaf for leaf in shard if _floats(leaf) and _has_rows(leaf, end - start)]
            rest = [leaf for leaf in shard if _floats(leaf) and not _has_rows(leaf, end - start)]
            rest += [p for p in seen.part.parameters() if p.requires_grad]
        if not isinstance(total, Tensor):
            return [outputs, [], []]
        gradients = torch.autograd.grad(total, [*own, *rest], materialize_grads=True)
        return [outputs, list(gradients[: len(own)]), list(gradients[len(own) :])]

    full = run(0, batch)
    if _apart(run(0, batch, seed=1), full) > 0:
        return f"{path} draws random numbers, so that its samples are independent could not be checked"
    if batch < 2:
        return f"the example has one sample, so that the samples of {path} are independent could not be checked"
    split = max(1, batch // 3)
    first, other = run(0, split), run(split, batch)
    joined = [[torch.cat(pair) for pair in zip(a, b, strict=True)] for a, b in zip(first[:2], other[:2], strict=True)]
    joined.append([a + b for a, b in zip(first[2], other[2], strict=True)])
    limit = max(TOLERANCE.get(x.dtype, 1e-2) for x in (*full[0], torch.zeros((), dtype=torch.float64)))
    for what, mine, theirs in zip(("what it returns", "a gradient", "a gradient"), joined, full, strict=True):
        apart = _apart([mine], [theirs])
        if apart > limit:
            raise CaptureError(
                f"{path} is declared to have independent samples (batch=True), but {what} differs by {apart:.2g} when "
                f"its {batch} samples are computed as {split} and {batch - split}; leave batch out, so that it runs "
                "replicated",
                path=path,
            )
    return ""


def _floats(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _has_rows(leaf: Any, batch: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch


def _apart(first: Sequence[Sequence[Tensor]], other: Sequence[Sequence[Tensor]]) -> float:
    """The largest deviation, relative to the largest entry."""
    worst = 0.0
    for mine, theirs in zip(first, other, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            if a.shape != b.shape:
                return float("inf")
            if a.numel():
                scale = float(b.detach().abs().max()) or 1.0
                worst = max(worst, float((a.detach().double() - b.detach().double()).abs().max()) / scale)
    return worst
