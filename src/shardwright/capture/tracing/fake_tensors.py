"""Fake tensors in the place of a module's real ones while it is traced.

Nothing is copied or allocated: a 70B model on meta and a small one on a device are
traced alike, on fake CPU tensors. Every tensor object gets its own fake, except that
parameters keep their identity, so that tied weights stay tied and one tensor passed
for two arguments becomes two.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree


class FakeTensors:
    """One fake mode, and the fakes made in it."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
        self._memo: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        with self.mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)

    def same(self, tensor: torch.Tensor) -> torch.Tensor:
        """The one fake for this tensor object."""
        if id(tensor) not in self._memo:
            self._memo[id(tensor)] = (tensor, self.fake(tensor))
        return self._memo[id(tensor)][1]

    def inputs(self, tree: Any) -> Any:
        """The tree with a fake of its own for every tensor leaf."""
        return pytree.tree_map_only(torch.Tensor, self.fake, tree)

    @contextmanager
    def in_place_of(self, module: nn.Module) -> Iterator[None]:
        """Swap the tensors of a module for fakes, and put them back whatever happens."""
        undo: list[tuple[dict[str, Any], dict[str, Any]]] = []
        modes = [(part, part.training) for part in module.modules()]
        random_state = torch.get_rng_state()
        try:
            for part in module.modules():
                both: list[dict[str, Any]] = [part._parameters, part._buffers]
                for slots in both:
                    undo.append((slots, dict(slots)))
                    slots.update({key: self.same(t) for key, t in slots.items() if t is not None})
                plain = {k: v for k, v in part.__dict__.items() if isinstance(v, torch.Tensor) and v.is_meta}
                undo.append((part.__dict__, plain))
                part.__dict__.update({key: self.same(tensor) for key, tensor in plain.items()})
            yield
        finally:
            for slots, before in reversed(undo):
                slots.update(before)
            for part, training in modes:
                part.training = training
            torch.set_rng_state(random_state)
