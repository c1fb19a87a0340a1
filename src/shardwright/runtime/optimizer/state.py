"""The user's `optimizer.state_dict()` and `load_state_dict()`, as they are on one device.

torch numbers an optimizer's state by the place of its parameters in the param groups. Shards stand in these
places, some of them not on this rank (of a pipeline), and state is cut as they are. So both ways are translated,
by the hooks that torch has for it:

    state_dict        numbered by the places of the original parameters; state that is cut is a shard, which
                      refuses to be pickled (`state_values`), and what is whole is what one device would have
    load_state_dict   takes that, or what an optimizer of the original saved on one device
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

from shardwright.errors import InputError

from ..parameters.state_dicts import loaded_state, state_value
from ..parameters.state_values import PartialState

Places = list[list[Any]]
"""For each param group what stands in the place of each original parameter: None if another rank has it."""

_places: WeakKeyDictionary[Optimizer, Places] = WeakKeyDictionary()


def remember_places(optimizer: Optimizer, replaced: Mapping[Any, Any]) -> None:
    """Say what stands for the optimizer's parameters from now on; parts of a model say it one after the other."""
    if optimizer not in _places:
        _places[optimizer] = [list(group["params"]) for group in optimizer.param_groups]
        optimizer.register_state_dict_post_hook(_numbered)
        optimizer.register_load_state_dict_pre_hook(_taken_over)
    for places in _places[optimizer]:
        places[:] = [place if place is None else replaced.get(place, place) for place in places]


def is_adopted(optimizer: Optimizer) -> bool:
    """Whether an optimizer knows that its parameters are shards."""
    return optimizer in _places


def _all_places(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], list[Any]]]:
    """Each group with its places; a group that was added later has its parameters as they are."""
    known = _places[optimizer]
    for number, group in enumerate(optimizer.param_groups):
        yield group, known[number] if number < len(known) else group["params"]


def _numbered(optimizer: Optimizer, own: dict[str, Any]) -> dict[str, Any]:
    """A state dict by original places. `own` is torch's, numbered by the parameters that are here."""
    state: dict[Any, Any] = {key: value for key, value in own["state"].items() if not isinstance(key, int)}
    groups, start, seen, elsewhere = [], 0, set(), False
    for group, places in _all_places(optimizer):
        for number, leaf in enumerate(places, start):
            elsewhere = elsewhere or leaf is None
            if leaf is not None and leaf in optimizer.state and id(leaf) not in seen:
                seen.add(id(leaf))
                state[number] = {key: state_value(leaf, key, value) for key, value in optimizer.state[leaf].items()}
        rest = {key: value for key, value in group.items() if key != "params"}
        groups.append({**rest, "params": list(range(start, start + len(places)))})
        start += len(places)
    return {**own, "state": PartialState(state) if elsewhere else state, "param_groups": groups}


def _taken_over(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """A state dict by original places, as torch loads it into the parameters that are here."""
    pairs = list(_all_places(optimizer))
    counts = [len(places) for _, places in pairs]
    if [len(group["params"]) for group in saved["param_groups"]] != counts:
        raise InputError(
            f"the state dict has param groups of {[len(group['params']) for group in saved['param_groups']]} "
            f"parameters, and the optimizer was made with {counts}; build it as it was when the state was saved"
        )
    numbers: dict[int, int] = {}
    for at, leaf in enumerate(leaf for group, _ in pairs for leaf in group["params"]):
        numbers.setdefault(id(leaf), at)
    state: dict[Any, Any] = {key: value for key, value in saved["state"].items() if not isinstance(key, int)}
    groups = []
    for before, (group, places) in zip(saved["param_groups"], pairs, strict=True):
        groups.append({**before, "params": [numbers[id(leaf)] for leaf in group["params"]]})
        for number, leaf in zip(before["params"], places, strict=True):
            if leaf is not None and number in saved["state"] and numbers[id(leaf)] not in state:
                state[numbers[id(leaf)]] = loaded_state(saved["state"][number], leaf)
    return {**saved, "state": state, "param_groups": groups}
