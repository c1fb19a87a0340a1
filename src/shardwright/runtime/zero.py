"""ZeRO-3: parameters that are stored split, gathered a unit at a time, and let go again.

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
whole gradient for every unit, which is what level 3 is there to avoid. Hooks that a user
puts on a split parameter do not run. A copy of a weight (a cast under autocast) is not a
view on the gathered buffer, and is kept like any other activation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from shardwright.errors import LayoutError

from . import journal
from .faults import told
from .holding import Held, coordinates, named, summing_axes, zero_axes
from .packing import Pack, whole_buffer
from .parameters import Untouched, raw_gradient, set_raw_gradient
from .world import Groups

Pair = tuple[Held, Parameter]


class Shards:
    """Parameters of one unit, one dtype and the same zero axes: gathered by one collective."""

    def __init__(
        self, pairs: Sequence[Pair], axes: tuple[str, ...], groups: Groups, wire: torch.dtype | None = None
    ) -> None:
        self.wire = wire or pairs[0][0].dtype  # gradients are summed in it
        self.pairs = list(pairs)
        self.group = groups[axes]
        self.pack = Pack([held for held, _ in pairs], axes, groups.mesh.sizes, coordinates(groups))
        with torch.no_grad(), Untouched():
            self.row = pairs[0][1].new_zeros(self.pack.width)
            for number, (_, parameter) in enumerate(pairs):
                home = self._home(number)
                home.copy_(parameter)
                parameter.data = home  # the shards live in the row, so that gathering copies nothing
        by_rest: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for number, (held, _) in enumerate(pairs):
            if held.trainable:
                by_rest[tuple(axis for axis in summing_axes(held, groups.mesh) if axis not in axes)].append(number)
        self.returns = [Return(self, numbers, rest, groups, axes) for rest, numbers in by_rest.items()]

    def __str__(self) -> str:
        return f"the parameters {named([held.name for held, _ in self.pairs])}"

    def _home(self, number: int) -> Tensor:
        return self.pack.own(self.row, number, self.group.index)

    def version(self) -> tuple[int, ...]:
        with Untouched():
            return tuple(parameter._version for _, parameter in self.pairs)

    def fill_row(self) -> Tensor:
        """The row to send. A parameter that was given other memory (`p.data = ..`) is brought home."""
        with torch.no_grad(), Untouched():
            for number, (_, parameter) in enumerate(self.pairs):
                home = self._home(number)
                if parameter.data_ptr() != home.data_ptr():
                    home.copy_(parameter)
                    parameter.data = home
        return self.row


class Gathered:
    """The whole parameters of some shards, or the promise of them."""

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        self.version = shards.version()
        row = shards.fill_row()
        self.rows: Tensor | None = row.new_empty(shards.pack.parts * shards.pack.width)
        journal.enter("all_gather", shards.group.process_group, shards)
        self.work = dist.all_gather_single(self.rows, row, group=shards.group.process_group, async_op=True)
        self.flat: Tensor | None = None
        self.offsets: list[int] = []

    @torch.no_grad()
    def wait(self) -> Tensor:
        """The flat buffer in which the whole parameters lie one after the other."""
        if self.flat is None:
            assert self.rows is not None
            if self.work is not None:
                self.work.wait()
                self.work = None  # which holds on to the rows
            pack = self.shards.pack
            rows = pack.rows(self.rows)
            self.flat, views = whole_buffer(pack.slots, rows)
            for number, view in enumerate(views):
                pack.take(rows, number, view)
                self.offsets.append(int(view.storage_offset()))
            self.rows = None
        return self.flat

    @torch.no_grad()
    def views(self) -> list[Tensor]:
        flat = self.wait()
        slots = self.shards.pack.slots
        return [flat.as_strided(s.shape, _strides(s.shape), at) for s, at in zip(slots, self.offsets, strict=True)]


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


class Return:
    """The way back: whole gradients to shares, and to `.grad`. One flag for each says whether it was used."""

    def __init__(
        self, shards: Shards, numbers: Sequence[int], rest: tuple[str, ...], groups: Groups, axes: tuple[str, ...]
    ) -> None:
        self.numbers = list(numbers)
        self.pairs = [shards.pairs[number] for number in numbers]
        self.group = shards.group
        self.rest = groups[rest].process_group if rest else None
        helds = [held for held, _ in self.pairs]
        self.pack = Pack(helds, axes, groups.mesh.sizes, coordinates(groups), extra=len(helds))
        self.sent: list[tuple[Tensor, Tensor, Any, bool]] = []

    def __str__(self) -> str:
        return f"the gradients of {named([held.name for held, _ in self.pairs])}"

    @torch.no_grad()
    def send(self, gradients: Sequence[Tensor | None], like: Tensor, wire: torch.dtype) -> None:
        """Start the sum of whole gradients (in the order of `numbers`) into shares."""
        full = all(gradient is not None for gradient in gradients)
        size = self.pack.parts * self.pack.width
        make = like.new_empty if full and not self.pack.padded else like.new_zeros
        flat = make(size, dtype=wire)
        rows = self.pack.rows(flat)
        flags = rows.narrow(1, self.pack.used, len(gradients))
        flags.copy_(torch.tensor([g is not None for g in gradients], dtype=flat.dtype, device=flat.device))
        for number, gradient in enumerate(gradients):
            if gradient is not None:
                self.pack.put(rows, number, gradient)
        row = flat.new_empty(self.pack.width)
        journal.enter("reduce_scatter", self.group.process_group, self)
        work = dist.reduce_scatter_single(row, flat, group=self.group.process_group, async_op=True)
        self.sent.append((row, flat, work, full))

    @torch.no_grad()
    def receive(self, leaf_of: Callable[[Tensor], Tensor]) -> None:
        """Wait for what was sent, and add it to `.grad`."""
        for row, _, work, full in self.sent:
            if work is not None:
                work.wait()
            if self.rest is not None:
                journal.enter("all_reduce", self.rest, self)
                dist.all_reduce(row, group=self.rest)
            flags = [1.0] * len(self.pairs) if full else row.narrow(0, self.pack.used, len(self.pairs)).tolist()
            for number, (held, parameter) in enumerate(self.pairs):
                if flags[number] > 0:
                    share = self.pack.own(row, number, self.group.index)
                    leaf = leaf_of(parameter)
                    old = raw_gradient(leaf)
                    set_raw_gradient(leaf, share.to(held.true_dtype) if old is None else old.add_(share))
        self.sent.clear()

    def drop(self) -> None:
        """Wait for what was sent, and forget it."""
        for _, _, work, _ in self.sent:
            if work is not None:
                work.wait()
        self.sent.clear()


class Opening(torch.autograd.Function):
    """One use of a unit: whole parameters out, their gradients back."""

    @staticmethod
    def forward(ctx: Any, zero: Zero3, gathered: Gathered, *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.zero, ctx.shards = zero, gathered.shards
        ctx.set_materialize_grads(False)
        views = gathered.views()
        ctx.mark_non_differentiable(
            *(v for v, (h, _) in zip(views, gathered.shards.pairs, strict=True) if not h.trainable)
        )
        return tuple(views)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.zero._returned(ctx.shards, gradients)
        return (None, None, *(None for _ in gradients))


@dataclass(frozen=True, slots=True)
class Saved:
    """Where a saved tensor lay in a gathered buffer."""

    shards: Shards
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Zero3:
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
        self._units: dict[str, list[Shards]] = {}
        self._loose: dict[str, list[Pair]] = {}
        for name, pairs in units.items():
            kinds: dict[tuple[tuple[str, ...], torch.dtype], list[Pair]] = defaultdict(list)
            for held, parameter in pairs:
                axes = zero_axes(held, groups.mesh.sizes) if held.level == 3 else ()
                kinds[axes, held.dtype].append((held, parameter))
            self._loose[name] = [pair for (axes, _), held in kinds.items() if not axes for pair in held]
            self._units[name] = [Shards(held, axes, groups, wire) for (axes, _), held in kinds.items() if axes]
        self._order = list(order)
        self._names = {id(shards): name for name, held in self._units.items() for shards in held}
        self._ready: dict[Shards, Gathered] = {}  # gathered or on the way
        self._live: dict[int, Shards] = {}  # by the address of the buffer
        self._again: list[Shards] = []  # gathered again by the backward that runs, oldest first
        self._sent: list[Return] = []
        self._task = -1
        self._stand_ins: dict[int, Tensor] = {}  # by the parameter

    def stand_in(self, parameter: Tensor, leaf: Tensor) -> None:
        """From here on give the gradients of a parameter to another leaf, which has its shape."""
        self._stand_ins[id(parameter)] = leaf

    def _leaf(self, parameter: Tensor) -> Tensor:
        return self._stand_ins.get(id(parameter), parameter)

    def open(self, name: str) -> dict[str, Tensor]:
        """The whole parameters of a unit, by key. Starts the gather of the next unit in the order."""
        found: dict[str, Tensor] = {}
        for held, parameter in self._loose[name]:
            found.update(dict.fromkeys(held.keys, self._leaf(parameter)))
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
                    whole = cast(tuple[Tensor, ...], Opening.apply(self, gathered, *leaves))  # type: ignore[no-untyped-call]
            else:
                whole = tuple(gathered.views())
            for (held, _), tensor in zip(pairs, whole, strict=True):
                found.update(dict.fromkeys(held.keys, tensor))
        return found

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

    def _gathered(self, shards: Shards) -> Gathered:
        gathered = self._ready.get(shards)
        if gathered is not None and gathered.version != shards.version():
            self._release(shards)
            gathered = None
        if gathered is None:
            gathered = self._ready[shards] = Gathered(shards)
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
                    self._ready[shards] = Gathered(shards)

    def _release(self, shards: Shards) -> None:
        gathered = self._ready.pop(shards, None)
        if gathered is None:
            return
        if gathered.flat is None and gathered.work is not None:
            gathered.work.wait()
        if gathered.flat is not None:
            self._live.pop(gathered.flat.untyped_storage().data_ptr(), None)

    # -- backward ----------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> Tensor | Saved:
        shards = self._live.get(tensor.untyped_storage().data_ptr())
        if shards is None or tensor.dtype != shards.row.dtype:
            return tensor
        return Saved(shards, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    @told
    def _unpack(self, saved: Tensor | Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        self._begin()
        shards = saved.shards
        flat = self._gathered(shards).wait()
        self._note_again(shards)
        return flat.as_strided(saved.size, saved.stride, saved.offset)

    def _note_again(self, shards: Shards) -> None:
        if shards not in self._again:
            self._again.append(shards)
            if len(self._again) > 2:  # frozen units have no backward of their own to end with
                self._release(self._again.pop(0))
            self._ahead(self._names[id(shards)], -1)

    @told
    def _returned(self, shards: Shards, gradients: Sequence[Tensor | None]) -> None:
        """A unit's backward is through: its gradients go out, its parameters go."""
        self._begin()
        if shards in self._again:
            self._again.remove(shards)
        self._release(shards)
        for back in shards.returns:
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

    @told
    def _end(self) -> None:
        for back in self._sent:
            back.receive(self._leaf)
        self._sent.clear()
        self._again.clear()
        for shards in list(self._ready):
            self._release(shards)
        self._task = -1
