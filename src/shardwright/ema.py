"""EMA of the weights over training, for evaluation and for the end.

    ema = EMA(model, decay=0.999)
    for x, y in data:
        ...
        optimizer.step()
        ema.update()
    with ema.swapped():
        evaluate(model)

Every rank averages what its optimizer updates: shards under tensor parallelism, shares under ZeRO, masters in float32.
Nothing is sent but when averages are put in the place of the weights. (`torch.optim.swa_utils.AveragedModel` copies
the whole model, which with its process groups can't be copied.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .errors import InputError, raise_all
from .runtime.model.access import state_of
from .runtime.model.parallel_model import ParallelModel
from .runtime.optimizer.adopt import leaf_of
from .runtime.parameters.refresh import Refresh
from .runtime.parameters.sharded import ShardedParameter, Untouched
from .runtime.parameters.state_dicts import name_of
from .runtime.parameters.state_values import as_state, region_of_value


class EMA:
    """Averages of a model's parameters: average += (1 - decay) * (parameter - average) at every update.

    The model is compiled (it has had an example or a call), or an ordinary one. All ranks make it, update it and swap
    it together. It has a `state_dict`, for `sw.save(..., extra={"ema": ema})`; what is saved under one plan is loaded
    under another.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        if not 0.0 <= decay <= 1.0:
            raise InputError(f"decay={decay} is no decay; use a number between 0 and 1, such as 0.999")
        for part in model.modules():
            if isinstance(part, ParallelModel):
                state_of(part)
        self.decay, self.updates = decay, 0
        self._leaves: dict[str, Any] = {}
        owners: list[ShardedParameter] = []
        for key, parameter in model.named_parameters():
            leaf = leaf_of(parameter)
            self._leaves[name_of(leaf) if isinstance(leaf, ShardedParameter) else key] = leaf
            if leaf is not parameter:
                owners.append(parameter)  # type: ignore[arg-type]
        self._refresh = Refresh(owners) if owners else None
        with Untouched(), torch.no_grad():
            self._averages = {key: _wide(leaf.detach()).clone() for key, leaf in self._leaves.items()}
        self._swapped = False

    def __repr__(self) -> str:
        return f"EMA(decay={self.decay}, {len(self._averages)} parameters, {self.updates} updates)"

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights as they are into the average. Call it after the optimizer's step."""
        if self._swapped:
            raise InputError("the model has its averages in the place of its weights; update outside of swapped()")
        self.updates += 1
        with Untouched():
            for key, leaf in self._leaves.items():
                self._averages[key].lerp_(leaf.to(self._averages[key].dtype), 1.0 - self.decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Within this the model has the averages for its weights."""
        if self._swapped:
            raise InputError("the averages are in the place of the weights already")
        with Untouched(), torch.no_grad():
            weights = {key: leaf.detach().clone() for key, leaf in self._leaves.items()}
        self._put(self._averages)
        self._swapped = True
        try:
            yield
        finally:
            self._put(weights)
            self._swapped = False

    @torch.no_grad()
    def _put(self, values: Mapping[str, Tensor]) -> None:
        with Untouched():
            for key, leaf in self._leaves.items():
                leaf.copy_(values[key])
        if self._refresh is not None:
            self._refresh()

    def state_dict(self) -> dict[str, Any]:
        """The averages by the names of parameters, as shards that share memory with these."""
        averages = {}
        for key, leaf in self._leaves.items():
            average = self._averages[key]
            split = isinstance(leaf, ShardedParameter) and leaf.groups is not None
            averages[key] = as_state(average, leaf.spec, leaf.spread, leaf.groups) if split else average
        return {"decay": self.decay, "updates": self.updates, "averages": averages}

    @torch.no_grad()
    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave, under this plan or another, with whole tensors or shards."""
        averages = values["averages"]
        raise_all(InputError, "the averages do not fit the model:", [
            f"missing: {key}" for key in self._leaves if key not in averages
        ])  # fmt: skip
        for key, leaf in self._leaves.items():
            if isinstance(leaf, ShardedParameter) and leaf.groups is not None:
                self._averages[key].copy_(region_of_value(averages[key], leaf.spec, leaf.spread, leaf.groups))
            else:
                self._averages[key].copy_(averages[key])
        self.decay, self.updates = values["decay"], values["updates"]


def _wide(tensor: Tensor) -> Tensor:
    """Small steps are lost in less than float32."""
    return tensor.float() if tensor.is_floating_point() and tensor.dtype.itemsize < 4 else tensor
