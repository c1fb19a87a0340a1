"""What an optimizer counts outside of its state, such as `group["step"] += 1` or `self.steps += 1`.

Where one step of the user's is several calls of the optimizer's own, on one tensor each, every call has to see these
numbers as they were before the step, and the step changes them once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

SettingName = tuple[
    int, str
]  # of a number: 0 and the attribute, or the number of the param group from 1 on and the key
_IGNORED = frozenset({"params", "param_groups", "_step_count", "_opt_called"})  # a scheduler counts calls of step


def changed_values(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> dict[Any, tuple[Any, bool]]:
    """What is new or has changed, on the CPU, and whether it was on another device."""
    return {
        key: (value.detach().cpu(), value.device.type != "cpu") if isinstance(value, Tensor) else (value, False)
        for key, value in after.items()
        if key not in before or not _equal(before[key], value)
    }


def _equal(one_value: Any, other: Any) -> bool:
    if isinstance(one_value, Tensor) and isinstance(other, Tensor):
        return one_value.shape == other.shape and one_value.dtype == other.dtype and torch.equal(one_value, other)
    return type(one_value) is type(other) and not isinstance(one_value, Tensor) and bool(one_value == other)


class StepSettings:
    """Numbers of the param groups and of the optimizer itself, as they were when this was made."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._places: list[dict[str, Any]] = [vars(optimizer), *optimizer.param_groups]
        self._before = self._read()
        self.changes: dict[SettingName, Any] = {}

    def _read(self) -> dict[SettingName, Any]:
        return {
            (number, key): value.detach().clone() if isinstance(value, Tensor) else value
            for number, place in enumerate(self._places)
            for key, value in place.items()
            if key not in _IGNORED and (isinstance(value, int | float) or _is_number(value))
        }

    def restore(self) -> None:
        """Make the numbers what they were."""
        for number, key in self._read().keys() - self._before.keys():
            del self._places[number][key]
        self._write(self._before)

    def note(self) -> None:
        """Remember what a call of step has changed."""
        self.changes.update(changed_values(self._before, self._read()))

    def take(self, changes: Mapping[SettingName, tuple[Any, bool]]) -> None:
        """Make the numbers what a step has made of them, on whatever rank."""
        self._write({name: value for name, (value, _) in changes.items()})

    def _write(self, values: Mapping[SettingName, Any]) -> None:
        for (number, key), value in values.items():
            current: Any = self._places[number].get(key)
            if isinstance(value, Tensor) and _is_number(current):
                current.copy_(value)
            else:
                self._places[number][key] = value


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad
