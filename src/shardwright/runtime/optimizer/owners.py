"""Updates that look at a full tensor, such as Muon's: each is made by one rank, its owner, and sent back as shards.

    one round   as many tensors of one shape and layout as there are ranks, parameters with gradients and state
                1. each rank gets one of them in full (`exchange.py`)
                2. the optimizer's own step runs on that one
                3. every rank gets its shards of all of them

So a matrix is orthogonalised once, and a rank has one full tensor at a time. What an optimizer keeps is known after its
first step; until then every rank gathers each tensor and makes every update itself. State that is not like
its parameter, such as a count of steps, is sent as objects once for each step of the optimizer, if it has changed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from shardwright.errors import InputError, raise_all

from ..collectives import objects
from ..parameters.refresh import Refresh
from ..parameters.sharded import ShardedParameter, Untouched
from .exchange import OwnerExchange
from .gathered import Closure, Inner, gathered_groups
from .settings import SettingName, StepSettings, changed_values
from .step_hooks import run_post_hooks, run_pre_hooks, without_hooks

MATRIX_DIMS = 2


@dataclass(frozen=True, eq=False)
class _Item:
    """A parameter that an optimizer updates: `group` and `place` say where it is among the param groups."""

    leaf: ShardedParameter
    group: int
    place: int

    @property
    def keys(self) -> list[str]:
        """The state that is like the parameter, and sharded as it is."""
        assert self.leaf.sharded_keys is not None
        return sorted(self.leaf.sharded_keys)

    def tensors(self, state: dict[str, Any]) -> list[Tensor]:
        """What the owner gets in full: parameter, gradient, and state that is like the parameter."""
        gradient = self.leaf.grad
        with Untouched():
            values = [self.leaf.detach(), gradient, *(state[key] for key in self.keys)]
            return [value.detach().as_subclass(Tensor) for value in values]

    @property
    def name(self) -> Hashable:
        """The same on all ranks that have shards of it, and on no others."""
        assert self.leaf.groups is not None
        return self.leaf.groups.mesh.devices, self.group, self.place


@dataclass
class _News:
    """What an owner has to tell the others after its updates."""

    state: dict[Hashable, dict[str, Any]] = field(default_factory=dict)
    settings: dict[SettingName, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.state or self.settings or self.faults)


def step_by_owners(optimizer: Optimizer, inner: Inner, closure: Closure | None, *, matrices: bool = False) -> Any:
    """A step of an optimizer whose updates look at one tensor, or with `matrices` at its last two dims."""
    closure = run_pre_hooks(optimizer, closure)
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    items = [
        _Item(leaf, number, place)
        for number, group in enumerate(optimizer.param_groups)
        for place, leaf in enumerate(group["params"])
        if leaf.grad is not None
    ]
    stepping, news = _Stepping(optimizer, inner), _News()
    known = [item for item in items if _has_known_state(optimizer, item.leaf)]
    for item in items:
        if not _has_known_state(optimizer, item.leaf):
            with stepping.alone(item.group, [item.leaf]), gathered_groups(optimizer, [stepping.group]):
                stepping.step()
    for same in _alike(optimizer, known):
        _step_round(stepping, same, matrices, news)
    stepping.finish(news)
    _hear(optimizer, known, news)
    behind = [item.leaf.owner for item in known if item.leaf.owner is not None]
    if behind:
        Refresh(behind)()
    run_post_hooks(optimizer)
    return loss


def _has_known_state(optimizer: Optimizer, leaf: Any) -> bool:
    return (
        isinstance(leaf, ShardedParameter)
        and leaf.groups is not None
        and bool(leaf.spec.shape)
        and leaf.sharded_keys is not None
        and leaf in optimizer.state
        and leaf.sharded_keys <= optimizer.state[leaf].keys()
    )


def _alike(optimizer: Optimizer, items: Sequence[_Item]) -> Iterator[list[_Item]]:
    """Items that are exchanged together: same param group, shape, layout, ranks, dtypes and state."""
    kinds: dict[Hashable, list[_Item]] = defaultdict(list)
    for item in items:
        leaf = item.leaf
        dtypes = tuple(tensor.dtype for tensor in item.tensors(optimizer.state[leaf]))
        kinds[item.group, leaf.spec.shape, leaf.spread, id(leaf.groups), dtypes, leaf.sharded_keys].append(item)
    yield from kinds.values()


class _Stepping:
    """Calls the optimizer's own step on some of its parameters. What it counts in a step, it counts once."""

    def __init__(self, optimizer: Optimizer, inner: Inner) -> None:
        self.optimizer, self._inner = optimizer, inner
        self._settings = StepSettings(optimizer)
        self.group: dict[str, Any] = {}

    @contextmanager
    def alone(self, number: int, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Within this the optimizer has one param group, and that has these parameters."""
        optimizer, groups = self.optimizer, self.optimizer.param_groups
        self.group = groups[number]
        before = list(self.group["params"])
        optimizer.param_groups, self.group["params"][:] = [self.group], parameters
        try:
            with without_hooks(optimizer):
                yield
        finally:
            self.group["params"][:], optimizer.param_groups = before, groups

    def step(self) -> None:
        self._settings.restore()
        self._inner()
        self._settings.note()

    def finish(self, news: _News) -> None:
        """Tell what the optimizer counts: a rank may have owned nothing."""
        news.settings.update(self._settings.changes)


def _step_round(stepping: _Stepping, items: Sequence[_Item], matrices: bool, news: _News) -> None:
    leaf, state = items[0].leaf, stepping.optimizer.state
    assert leaf.groups is not None
    first_dim = max(0, len(leaf.spec.shape) - MATRIX_DIMS) if matrices else 0
    exchange = OwnerExchange(leaf.spread, leaf.groups, first_dim)
    for start in range(0, len(items), exchange.owners):
        some = items[start : start + exchange.owners]
        local = [item.tensors(state[item.leaf]) for item in some]
        nothing = [[torch.zeros_like(tensor) for tensor in local[0]]] * (exchange.owners - len(some))
        full = [exchange.gather(column) for column in zip(*local, *nothing, strict=True)]
        updated = [full[0], *full[2:]]
        if exchange.own < len(some):
            updated = _update(stepping, some[exchange.own], full, news)
        for number, tensor in enumerate(updated):
            shards = exchange.shard(tensor)
            for shard, mine in zip(shards, local, strict=False):
                target = mine[number + 1 if number else 0]
                with torch.no_grad(), Untouched():
                    target.copy_(shard)


def _update(stepping: _Stepping, item: _Item, full: Sequence[Tensor], news: _News) -> list[Tensor]:
    """Step on a full tensor; returns the parameter and its state, and notes what else has changed."""
    optimizer, leaf, keys = stepping.optimizer, item.leaf, item.keys
    parameter = Parameter(full[0], requires_grad=leaf.requires_grad)
    parameter.grad = full[1]
    before = optimizer.state[leaf]
    small = {key: value for key, value in before.items() if key not in keys}
    copies = {key: value.clone() if isinstance(value, Tensor) else value for key, value in small.items()}
    optimizer.state[parameter] = {**copies, **dict(zip(keys, full[2:], strict=True))}
    with stepping.alone(item.group, [parameter]):
        stepping.step()
    after = optimizer.state.pop(parameter)
    strange = [key for key in keys if key not in after or _kind(after[key]) != _kind(full[2 + keys.index(key)])]
    strange += [k for k, v in after.items() if k not in keys and isinstance(v, Tensor) and v.shape == parameter.shape]
    if strange:
        news.faults.append(
            f"{type(optimizer).__name__} keeps other state for {leaf.spec.name} than after its first step: "
            f"{', '.join(map(repr, strange))} came, went or changed its shape or dtype"
        )
        return [parameter.detach(), *full[2:]]
    changed = changed_values(small, {key: value for key, value in after.items() if key not in keys})
    if changed:
        news.state[item.name] = changed
    return [parameter.detach(), *(after[key].detach() for key in keys)]


def _kind(value: Any) -> Any:
    return (value.shape, value.dtype) if isinstance(value, Tensor) else None


def _hear(optimizer: Optimizer, items: Sequence[_Item], news: _News) -> None:
    """Take in what owners have noted. All ranks must call it, also those of other stages."""
    if not any(objects.all_gather_numbers(int(bool(news)), "whether an optimizer has more to send")):
        return
    every = objects.all_gather_objects(news, "what an optimizer counts")
    raise_all(
        InputError,
        'its updates can\'t be spread over ranks; declare the class update_needs = "everything":',
        list(dict.fromkeys(fault for other in every for fault in other.faults)),
    )
    for item in items:
        for other in every:
            for key, (value, on_device) in other.state.get(item.name, {}).items():
                to_device = on_device and isinstance(value, Tensor)
                optimizer.state[item.leaf][key] = value.to(item.leaf.device) if to_device else value
    StepSettings(optimizer).take({name: value for other in every for name, value in other.settings.items()})


step_by_matrix_owners = partial(step_by_owners, matrices=True)
