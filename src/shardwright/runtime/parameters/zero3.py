"""ZeRO-3: parameters that are stored split, gathered a unit at a time, and released again.

A unit is a handful of parameters that are needed together, such as a block. Its shards lie
next to each other in one row, so that one all_gather brings all of them, and one
reduce_scatter takes all their gradients back, in the dtype of the parameters or in another:

    forward    open a | compute a, close a | compute b, close b | ..
    network    gather a,  gather b ======    gather c =======
    backward   .. | b's backward, reduce b | a's backward, reduce a | end: .grad += shares
    network         gather a ======          reduce b ======  reduce a ===

Autograd would keep the gathered weights from forward to backward. Inside `saving()` it keeps
only where a weight was (pack, offset, size, stride), and gathers it again when backward asks.

Shares of gradients are summed at once, also under `no_sync`: putting it off would need a
whole gradient for every unit, which is what ZeRO-3 is there to avoid. A copy of a weight (a cast
under autocast) is not a view on the gathered buffer, and is kept like any other activation.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from shardwright.errors import InputError, LayoutError
from shardwright.storage import Storage, effective_storage

from ..faults.watch import report_failure
from ..world import Groups
from .buckets import expect_plain
from .gradient_destination import destination_of
from .sharded import ShardedParameter, Untouched
from .storage_runtime import runtime_class
from .zero3_shards import GatheredUnit, GradientReturn, Pair, UnitShards


class UnitUse(torch.autograd.Function):
    """One use of a unit: whole parameters out, their gradients back."""

    @staticmethod
    def forward(ctx: Any, zero: UnitGatherer, gathered: GatheredUnit, *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.zero, ctx.shards = zero, gathered.shards
        ctx.set_materialize_grads(False)
        views = gathered.views()
        ctx.mark_non_differentiable(*(v for v, needs in zip(views, ctx.needs_input_grad[2:], strict=True) if not needs))
        return tuple(views)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        nodes = [node for node, _ in ctx.next_functions]
        where = ["nowhere" if node is None else destination_of(node) for node in nodes]
        accumulated = [gradient if to == "grad" else None for gradient, to in zip(gradients, where, strict=True)]
        ctx.zero._returned(ctx.shards, accumulated, {at for at, to in enumerate(where) if to == "grad"})
        requested = [gradient if to == "caller" else None for gradient, to in zip(gradients, where, strict=True)]
        return None, None, *ctx.shards.summed(requested)


@dataclass(frozen=True, slots=True)
class SavedView:
    """Where a saved tensor lay in a gathered buffer, in which of its parameters, and of which values."""

    shards: UnitShards
    number: int
    version: tuple[int, int]
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """Any other saved tensor. Torch does not look at versions where hooks save tensors, so that this has to."""

    tensor: Tensor
    version: int

    def checked(self) -> Tensor:
        if self.tensor._version != self.version:
            raise InputError(
                f"a tensor {list(self.tensor.shape)} that backward needs was changed in place since the forward (it is "
                f"at version {self.tensor._version}, and was at {self.version}): an input of the model or something "
                "that was made of one; change a copy of it, or change it after backward"
            )
        return self.tensor


class UnitGatherer:
    """The units of a model whose parameters are stored split. `order` is the order of their use in forward."""

    def __init__(
        self,
        units: Mapping[str, Sequence[Pair]],
        groups: Groups,
        order: Sequence[str],
        wire: torch.dtype | None = None,
    ) -> None:
        unknown = sorted(set(order) - set(units))
        if unknown:
            raise LayoutError(f"the order of gathers names units that there are not: {', '.join(unknown)}")
        self._units: dict[str, list[UnitShards]] = {}
        self._loose: dict[str, list[Pair]] = {}
        for name, pairs in units.items():
            kinds: dict[tuple[Storage, str], list[Pair]] = defaultdict(list)
            for spec, parameter in pairs:
                kinds[effective_storage(spec, groups.mesh.sizes), spec.dtype].append((spec, parameter))
            self._loose[name] = [pair for (storage, _), kind in kinds.items() if not storage.axes for pair in kind]
            self._units[name] = [
                runtime_class(storage, UnitShards)(kind, storage.axes, groups, wire)
                for (storage, _), kind in kinds.items()
                if storage.axes
            ]
        self._order = list(order)
        self._names = {id(shards): name for name, unit in self._units.items() for shards in unit}
        self._ready: dict[UnitShards, GatheredUnit] = {}  # gathered or on the way
        self._live: dict[int, UnitShards] = {}  # by the address of the buffer
        self._again: list[UnitShards] = []  # gathered again by the backward that runs, oldest first
        self._sent: list[GradientReturn] = []
        self._task = -1
        self._stand_ins: dict[int, Tensor] = {}  # by the parameter

    def stand_in(self, parameter: Tensor, leaf: Tensor) -> None:
        """From here on give the gradients of a parameter to another leaf, which has its shape."""
        self._stand_ins[id(parameter)] = leaf
        if isinstance(parameter, ShardedParameter):  # gets its gradient whole, at the end of the schedule
            parameter.hooks.summed_later = parameter.hooks.in_shares = False

    def _leaf(self, parameter: Tensor) -> Tensor:
        return self._stand_ins.get(id(parameter), parameter)

    def open(self, name: str) -> dict[str, Tensor]:
        """The whole parameters of a unit, by key. Starts the gather of the next unit in the order."""
        parameters: dict[str, Tensor] = {}
        for spec, parameter in self._loose[name]:
            parameters.update(dict.fromkeys(spec.keys, self._leaf(parameter)))
        opened = [self._gathered(shards) for shards in self._units[name]]
        if torch._C._current_graph_task_id() == -1:
            self._ahead(name, 1)
        else:  # a recomputation
            self._begin()
            for gathered in opened:
                self._note_again(gathered.shards)
        for gathered in opened:
            pairs = gathered.shards.pairs
            if torch.is_grad_enabled() and gathered.shards.returns:
                with Untouched():
                    leaves = [self._leaf(parameter) for _, parameter in pairs]
                    views = cast(tuple[Tensor, ...], UnitUse.apply(self, gathered, *leaves))  # type: ignore[no-untyped-call]
            else:
                views = tuple(gathered.views())
            for (spec, _), tensor in zip(pairs, views, strict=True):
                parameters.update(dict.fromkeys(spec.keys, tensor))
        return parameters

    def close(self, name: str) -> None:
        """Let the gathered parameters of a unit go. In a recomputation its backward comes next, and does that."""
        if torch._C._current_graph_task_id() != -1:
            return
        for shards in self._units[name]:
            self._release(shards)

    def saving(self) -> torch.autograd.graph.saved_tensors_hooks:
        """A context for forward in which autograd keeps no gathered parameter alive."""
        for shards in list(self._ready):
            if shards not in self._live.values():
                self._release(shards)  # fetched ahead and never used, by now perhaps stale
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _gathered(self, shards: UnitShards) -> GatheredUnit:
        gathered = self._ready.get(shards)
        if gathered is not None and gathered.version != shards.version():
            self._release(shards)
            gathered = None
        if gathered is None:
            gathered = self._ready[shards] = GatheredUnit(shards)
        self._live[gathered.wait().untyped_storage().data_ptr()] = shards
        return gathered

    def _ahead(self, name: str, step: int) -> None:
        """Start the gather of the neighbour in the order, if it is not on its way."""
        if name not in self._order:
            return
        place = self._order.index(name) + step
        if 0 <= place < len(self._order):
            for shards in self._units[self._order[place]]:
                if shards not in self._ready:
                    self._ready[shards] = GatheredUnit(shards)

    def _release(self, shards: UnitShards) -> None:
        gathered = self._ready.pop(shards, None)
        if gathered is None:
            return
        if gathered.flat is None:
            gathered.work.wait()
        if gathered.flat is not None:
            self._live.pop(gathered.flat.untyped_storage().data_ptr(), None)

    # -- backward ----------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> KeptTensor | SavedView:
        shards = self._live.get(tensor.untyped_storage().data_ptr())
        if shards is None or tensor.dtype != shards.row.dtype:
            return KeptTensor(tensor, tensor._version)
        gathered, offset = self._ready[shards], int(tensor.storage_offset())
        number = bisect_right(gathered.offsets, offset) - 1
        return SavedView(shards, number, gathered.version[number], tuple(tensor.shape), tensor.stride(), offset)

    @report_failure
    def _unpack(self, saved: KeptTensor | SavedView) -> Tensor:
        if isinstance(saved, KeptTensor):
            return saved.checked()
        self._begin()
        shards = saved.shards
        if saved.version != shards.version()[saved.number]:  # others of the unit may have, such as what forward writes
            raise InputError(
                f"the parameter {shards.pairs[saved.number][0].name} has changed since the forward whose backward "
                "runs, and ZeRO-3 gathers it again for it; call the model again after a step, or use zero2, where "
                "torch says what was changed"
            )
        flat = self._gathered(shards).wait()
        self._note_again(shards)
        return flat.as_strided(saved.size, saved.stride, saved.offset)

    def _note_again(self, shards: UnitShards) -> None:
        if shards not in self._again:
            self._again.append(shards)
            if len(self._again) > 2:  # frozen units have no backward of their own to end with
                self._release(self._again.pop(0))
            self._ahead(self._names[id(shards)], -1)

    @report_failure
    def _returned(self, shards: UnitShards, gradients: Sequence[Tensor | None], wanted: Container[int]) -> None:
        """A unit's backward is through: its gradients go out, its parameters go. `wanted` go to `.grad`."""
        self._begin()
        for gradient, (spec, _) in zip(gradients, shards.pairs, strict=True):
            if gradient is not None:
                expect_plain(spec, gradient)
        if shards in self._again:
            self._again.remove(shards)
        self._release(shards)
        for back in shards.returns:
            if not any(number in wanted for number in back.numbers):
                continue
            back.send([gradients[number] for number in back.numbers], shards.row, shards.wire)
            self._sent.append(back)
        while len(self._sent) > 2:  # bound the whole gradients in flight
            self._sent.pop(0).receive(self._leaf)

    def _begin(self) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task and task != -1:
            for back in self._sent if self._task != -1 else ():
                back.drop()  # of a backward that raised before its end
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    @report_failure
    def _end(self) -> None:
        for back in self._sent:
            back.receive(self._leaf)
        self._sent.clear()
        self._again.clear()
        for shards in list(self._ready):
            self._release(shards)
        self._task = -1
