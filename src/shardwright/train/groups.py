"""Parameter groups of the optimizer by patterns of names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ..errors import InputError, raise_all


def grouped(model: nn.Module, groups: Sequence[Mapping[str, Any]]) -> list[nn.Parameter] | list[dict[str, Any]]:
    """The parameters for an optimizer, or groups of them.

    asked   such as [{"match": ["*.bias", "*norm*"], "weight_decay": 0.0}]: a parameter goes to the first group with a
            matching pattern; the others form a group with default settings, which comes first
    """
    named = dict(model.named_parameters())
    if not groups:
        return list(named.values())
    patterns = [_patterns(group, number) for number, group in enumerate(groups)]
    faults = [
        f"{pattern!r} matches no parameter{_near(pattern, named)}"
        for each in patterns
        for pattern in each
        if not any(fnmatchcase(name, pattern) for name in named)
    ]
    raise_all(InputError, "optimization.parameter_groups:", faults)
    rest: list[nn.Parameter] = []
    matched: list[list[nn.Parameter]] = [[] for _ in groups]
    for name, parameter in named.items():
        at = [number for number, each in enumerate(patterns) if any(fnmatchcase(name, pattern) for pattern in each)]
        (matched[at[0]] if at else rest).append(parameter)
    param_groups: list[dict[str, Any]] = [{"params": rest}] if rest else []
    for group, parameters in zip(groups, matched, strict=True):
        settings = {key: value for key, value in group.items() if key != "match"}
        param_groups += [{"params": parameters, **settings}] if parameters else []
    return param_groups


def _patterns(group: Mapping[str, Any], number: int) -> list[str]:
    patterns = group.get("match")
    if not patterns or "params" in group:
        raise InputError(
            f"optimization.parameter_groups[{number}] needs a pattern: {{match: '*.bias', weight_decay: 0.0}}; it has "
            f"{', '.join(group) or 'nothing'}"
        )
    return [patterns] if isinstance(patterns, str) else list(patterns)


def _near(pattern: str, named: Mapping[str, nn.Parameter]) -> str:
    near = get_close_matches(pattern.replace("*", ""), list(named), n=1, cutoff=0.4)
    return f"; did you mean {near[0]!r}?" if near else ""
