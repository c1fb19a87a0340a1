"""Match saved tensors to a model: which saved key each of its tensors is read from."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import CheckpointError, raise_all
from .index import Index
from .key_owners import KeyOwners


def fit(
    census: KeyOwners, index: Index, tied: Mapping[str, str], prefix: str, strict: bool, what: str, under: str = ""
) -> dict[str, str]:  # fmt: skip
    """For each tensor of the model its key in the index, both with `prefix`. All faults are raised at once.

    A tied weight may be saved under any of its keys, or under one that `tied` maps to. Shapes must match;
    missing and unexpected keys are faults if `strict`. Only keys that start with `under` are matched.
    """
    known = {
        key.removeprefix(prefix): entry.spec.shape for key, entry in index.entries.items() if key.startswith(prefix)
    }
    mine: dict[str, list[str]] = {}
    for key, first in census.first.items():
        if key.startswith(under):
            mine.setdefault(first, []).append(key)
    saved_keys: dict[str, str] = {}
    loose, wrong = [], []
    for first, keys in mine.items():
        saved = next((tied.get(key, key) for key in keys if tied.get(key, key) in known), None)
        if saved is None:
            loose.append(f"missing: {first}")
        elif known[saved] != census.shapes[first]:
            wrong.append(f"{first} has shape {census.shapes[first]}, and was saved with {known[saved]}")
        else:
            saved_keys[first] = saved
    used = set(census.first) | set(saved_keys.values())
    loose += [f"unexpected: {key}" for key in known if key not in used]
    raise_all(CheckpointError, f"{what} does not fit the model:", [*wrong, *(loose if strict else ())])
    return {prefix + first: prefix + saved for first, saved in saved_keys.items()}
