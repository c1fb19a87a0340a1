"""Compare a graph with the module it came from: outputs, gradients, buffers, and what it says of each value."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwright.capture import CapturedGraph, capture, run
from shardwright.ir import Op


def tensors_of(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return (
        dict(module.named_parameters(remove_duplicate=False)),
        dict(module.named_buffers(remove_duplicate=False)),
    )


def agree(module: nn.Module, *args: Any, tolerance: float = 1e-12, **kwargs: Any) -> CapturedGraph:
    """Capture, run the graph and the module with the same seed, and assert that they agree."""
    captured = capture(module, args, kwargs)
    original = copy.deepcopy(module)
    torch.manual_seed(5)
    expected = [leaf for leaf in pytree.tree_leaves(original(*args, **kwargs)) if isinstance(leaf, Tensor)]
    torch.manual_seed(5)
    parameters, buffers = tensors_of(module)
    by_key = {key: buffer.clone() for key, buffer in buffers.items()}
    outputs, updates, values = run(captured, captured.flatten(args, kwargs), parameters, by_key)
    assert all(torch.equal(value, buffers[key]) for key, value in by_key.items()), "an op wrote to a buffer unseen"
    actual = [leaf for leaf in pytree.tree_leaves(captured.unflatten(outputs)) if isinstance(leaf, Tensor)]
    assert len(actual) == len(expected)
    for mine, theirs in zip(actual, expected, strict=True):
        assert distance(mine, theirs) <= tolerance
    for name, item in values.items():
        value = captured.graph.values[name]
        assert (tuple(item.shape), str(item.dtype)) == (value.shape, f"torch.{value.dtype}"), value
        assert item.requires_grad == value.gradient, captured.graph.producer.get(name, value)
    for key, item in original.named_buffers():
        assert distance(updates.get(key, dict(module.named_buffers())[key]), item) <= tolerance, key
    gradients_agree(module, actual, original, expected, tolerance)
    return captured


def gradients_agree(
    module: nn.Module, actual: list[Tensor], original: nn.Module, expected: list[Tensor], tolerance: float
) -> None:
    for value, outputs in ((module, actual), (original, expected)):
        total = sum(out.sum() for out in outputs if out.requires_grad)
        value.zero_grad()
        if isinstance(total, Tensor):
            total.backward()
    largest = max([p.grad.abs().max().item() for p in original.parameters() if p.grad is not None], default=0.0)
    for (key, mine), (_, theirs) in zip(module.named_parameters(), original.named_parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), key
        if mine.grad is not None and theirs.grad is not None:
            assert (mine.grad - theirs.grad).abs().max().item() <= tolerance * (1 + largest), key


def distance(mine: Tensor, theirs: Tensor) -> float:
    assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
    if not mine.is_floating_point():
        return float((mine != theirs).any())
    return float((mine.detach() - theirs.detach()).abs().max()) if mine.numel() else 0.0


def ops(captured: CapturedGraph, kind: str) -> list[Op]:
    """The ops whose aten name is `kind`."""
    return [op for op in captured.graph.ops if op.target.split(".")[1] == kind]
