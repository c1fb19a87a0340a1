"""Interpret batches and model outputs of any form: call arguments, samples, tokens, the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import InputError
from ..parallelize import arguments_of
from ..runtime.model.parallel_model import ParallelModel

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

IGNORED = -100
LABELS = ("labels", "label", "targets", "target", "y")
IDS = ("input_ids", "ids", "idx", "tokens", "x")


def arguments(batch: Any) -> Arguments:
    """A batch as the arguments of a call: a tensor, a tuple (by position) or a dict (by name)."""
    if isinstance(batch, Tensor | Mapping | Sequence) and not isinstance(batch, str | bytes):
        return arguments_of(batch)
    raise InputError(
        f"the data gives batches of type {type(batch).__name__}; a batch is a tensor, a tuple of arguments or a dict "
        "of arguments by name"
    )


def move_to(batch: Any, device: torch.device) -> Any:
    """The same batch on a device."""
    if device.type == "cpu":
        return batch
    return pytree.tree_map(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, batch)


def tensors_of(batch: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(arguments(batch)) if isinstance(leaf, Tensor)]


def samples_in(batch: Any, model: ParallelModel) -> int:
    """Number of samples in a batch; where neither sizes nor the user tell, the first dim of its first tensor."""
    tensors = [tensor for tensor in tensors_of(batch) if tensor.dim()]
    samples = model.call_inputs.samples(*arguments(batch))
    return samples if samples is not None else int(tensors[0].shape[0]) if tensors else 0


def tokens_in(batch: Any) -> int:
    """Number of tokens in a batch; 0 if it has no ids."""
    args, kwargs = arguments(batch)
    named = [kwargs[name] for name in IDS if name in kwargs]
    for value in (*named, *args, *kwargs.values()):
        if (
            isinstance(value, Tensor)
            and value.dim() == 2
            and not value.is_floating_point()
            and value.dtype != torch.bool
        ):
            return value.numel()
    return 0


def count_labels_in(batch: Any) -> Tensor:
    """Number of labels in a batch that are not ignored by the loss."""
    args, kwargs = arguments(batch)
    named = [kwargs[name] for name in LABELS if name in kwargs]
    labels = [
        value for value in (*named, *reversed(args)) if isinstance(value, Tensor) and not value.is_floating_point()
    ]
    if not labels:
        raise InputError(
            'reduction="token" counts labels other than -100, but this batch has no integer labels: pass them as '
            f'the last item of a tuple, or in a dict as one of {", ".join(LABELS)}; or use reduction="mean"'
        )
    return (labels[0] != IGNORED).sum()


def loss_of(output: Any) -> Tensor:
    """The loss in a model's output: itself, `loss` of a dict or an object, or the first item of a tuple."""
    loss = output
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif not isinstance(output, Tensor) and hasattr(output, "loss"):
        loss = output.loss
    elif isinstance(output, tuple | list) and output:
        loss = output[0]
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.reshape(())
    description = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(output).__name__}"
    if isinstance(output, Mapping):
        description += f" with {', '.join(map(str, output)) or 'nothing'}"
    raise InputError(
        f"the model returns {description}, and no loss; a loss is a scalar: alone, 'loss' of a dict, or the first item "
        "of a tuple. Or pass a loss function: loss=torch.nn.functional.cross_entropy"
    )


def numbers_of(output: Any) -> dict[str, Tensor]:
    """The named scalars in a model's output, the loss first."""
    numbers = {"loss": loss_of(output).detach()}
    if isinstance(output, Mapping):
        numbers |= {
            str(name): value.detach().reshape(())
            for name, value in output.items()
            if isinstance(value, Tensor) and value.numel() == 1 and name != "loss"
        }
    return numbers


def weighted(outputs: Sequence[dict[str, Tensor]], weights: Sequence[float]) -> dict[str, Tensor]:
    """The weighted sum of the outputs' scalars."""
    names = [name for name in outputs[0] if all(name in output for output in outputs)]
    pairs = list(zip(outputs, weights, strict=True))
    return {name: torch.stack([output[name] * weight for output, weight in pairs]).sum(0) for name in names}
