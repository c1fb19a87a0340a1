"""The full state of an optimizer: every parameter by name, whichever rank holds it.

A rank's optimizer lists the parameters of the rank. The saved state has all of them, so that
parameter groups keep their members under any plan:

    {"groups": [{"lr": 0.1, ..., "params": ["embed.weight", ...]}, ...], "state": {name: {...}}}

State with the shape of its parameter is saved in shards; other state is equal on all ranks. An optimizer
needs no state to be loaded into: the saved state tells what to create.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import CheckpointError, raise_all
from ..formats import show
from ..runtime.parameters.sharded import ShardedParameter, Untouched
from ..runtime.parameters.state_dicts import state_value
from ..runtime.parameters.state_values import as_state
from .encoding import decode, encode, keys_of
from .index import Index
from .key_owners import KeyOwners


def collect(optimizer: Optimizer, path: str, census: KeyOwners, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """This rank's part of an optimizer, as JSON; shards go to `tensors`."""
    groups = []
    state: dict[str, Any] = {}
    for number, group in enumerate(optimizer.param_groups):
        names = [census.name_of(leaf) for leaf in group["params"]]
        rest = {key: value for key, value in group.items() if key != "params"}
        groups.append({**encode(rest, f"{path}/groups/{number}", tensors), "params": names})
        for name, leaf in zip(names, group["params"], strict=True):
            if leaf in optimizer.state and census.writes(name):
                values = {key: state_value(leaf, key, value) for key, value in optimizer.state[leaf].items()}
                state[name] = encode(values, f"{path}/{name}", tensors)
    return {"kind": type(optimizer).__name__, "groups": groups, "state": state}


def merge_optimizers(parts: Sequence[Mapping[str, Any]], census: KeyOwners) -> dict[str, Any]:
    """Merge the optimizer states of several stages."""
    merged = {**parts[0], "groups": [dict(group) for group in parts[0]["groups"]], "state": dict(parts[0]["state"])}
    for other in parts[1:]:
        if len(other["groups"]) != len(merged["groups"]):
            raise CheckpointError(
                f"ranks have optimizers with {len(merged['groups'])} and {len(other['groups'])} param groups; "
                "create the optimizer before parallelize, the same on all ranks"
            )
        merged["state"] |= other["state"]
    for number, group in enumerate(merged["groups"]):
        names = {name for part in parts for name in part["groups"][number]["params"]}
        group["params"] = group["params"] if len(parts) == 1 else census.sorted(names)
    return merged


class Restored:
    """Restores a saved optimizer: first check, then read, then set."""

    def __init__(self, optimizer: Optimizer, saved: Mapping[str, Any], census: KeyOwners, index: Index) -> None:
        self._optimizer, self._saved, self._index = optimizer, saved, index
        self._names = {leaf: census.name_of(leaf) for group in optimizer.param_groups for leaf in group["params"]}
        self._on_device = {
            id(leaf): bool(group.get("capturable") or group.get("fused"))
            for group in optimizer.param_groups
            for leaf in group["params"]
        }
        self._groups: list[Mapping[str, Any]] = []
        self._sharded_keys: dict[Any, frozenset[str]] = {}
        self._local: dict[str, Tensor] = {}
        self.targets: dict[str, Tensor] = {}  # what to read, by key
        self._match()
        for leaf, name in self._names.items():
            if name in saved["state"]:
                self._make(leaf, name)
        for group in self._groups:
            for key in keys_of({option: value for option, value in group.items() if option != "params"}):
                spec = index.entries[key].spec
                self.targets[key] = self._local[key] = torch.empty(spec.shape, dtype=spec.dtype)

    def _match(self) -> None:
        """The saved group of each group: the one with its parameters, or at its position if it has none here."""
        groups = self._saved["groups"]
        where = {name: number for number, group in enumerate(groups) for name in group["params"]}
        faults = []
        for number, group in enumerate(self._optimizer.param_groups):
            names = [self._names[leaf] for leaf in group["params"]]
            missing = [name for name in names if name not in where]
            matches = sorted({where[name] for name in names if name in where}) or [number]
            if missing:
                faults.append(f"group {number} has {', '.join(missing[:4])}, which the saved optimizer did not train")
            elif len(matches) > 1 or matches[0] >= len(groups):
                faults.append(f"the parameters of group {number} were in groups {matches} of {len(groups)}")
            else:
                self._groups.append(groups[matches[0]])
                faults += [f"group {number}: {fault}" for fault in _option_faults(group, groups[matches[0]])]
        kind = f"the optimizer does not fit the saved one ({self._saved['kind']}); build it as it was:"
        raise_all(CheckpointError, kind, faults)

    def _make(self, leaf: Any, name: str) -> None:
        """Allocate each tensor of a parameter's state: sharded if it has the parameter's shape."""
        sharded: set[str] = set()
        for part, value in self._saved["state"][name].items():
            for key in keys_of(value):
                spec = self._index.entries[key].spec
                shaped = isinstance(leaf, ShardedParameter) and spec.shape == leaf.spec.shape and spec.shape != ()
                dtype = self._dtype(leaf, name, part, spec.dtype)
                if shaped and _is_direct(value):
                    assert leaf.groups is not None
                    with Untouched():
                        local = torch.empty(leaf.shape, dtype=dtype, device=leaf.device)
                    self.targets[key] = as_state(local, leaf.spec, leaf.spread, leaf.groups)
                    sharded.add(part)
                else:
                    local = torch.empty(spec.shape, dtype=dtype, device=self._device(leaf, part))
                    self.targets[key] = local
                self._local[key] = local
        if isinstance(leaf, ShardedParameter) and leaf.spec.shape:
            self._sharded_keys[leaf] = frozenset(sharded)

    def _dtype(self, leaf: Any, name: str, part: str, saved: torch.dtype) -> torch.dtype:
        """The saved dtype, unless the parameter's dtype has changed: then as torch does it."""
        was = self._index.entries.get(f"model/{name}")
        same = was is None or was.spec.dtype == leaf.dtype
        return saved if same or part == "step" or not saved.is_floating_point else leaf.dtype

    def _device(self, leaf: Any, part: str) -> torch.device:
        """torch keeps step counts on the CPU, except for variants that count on the device."""
        device: torch.device = leaf.device
        return device if part != "step" or self._on_device[id(leaf)] else torch.device("cpu")

    def set(self) -> None:
        """Set the loaded state."""
        for group, saved in zip(self._optimizer.param_groups, self._groups, strict=True):
            rest = {key: value for key, value in saved.items() if key != "params"}
            group.update(decode(rest, self._local.__getitem__))
            for leaf in group["params"]:
                state = self._saved["state"].get(self._names[leaf])
                if state is None:
                    self._optimizer.state.pop(leaf, None)
                    continue
                self._optimizer.state[leaf] = decode(state, self._local.__getitem__)
                if leaf in self._sharded_keys:
                    leaf.sharded_keys = self._sharded_keys[leaf]


def _option_faults(group: Mapping[str, Any], saved: Mapping[str, Any]) -> Iterator[str]:
    """Options of another type than the optimizer's own, which would only fail, or do something else, in its step."""
    for option, own in group.items():
        value = saved.get(option, own)
        if option == "params" or _is_direct(value) or own is None or value is None:
            continue
        wanted = bool if isinstance(own, bool) else int | float if isinstance(own, int | float) else None
        value = decode(value, lambda key: torch.empty(()))
        if wanted is not None and (not isinstance(value, wanted) or isinstance(value, bool) != (wanted is bool)):
            yield f"{option} is {own!r} here, and was saved as {show(value)}"


def _is_direct(value: Any) -> bool:
    return isinstance(value, dict) and value.get("$") == "tensor"
