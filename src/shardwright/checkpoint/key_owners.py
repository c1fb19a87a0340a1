"""All keys of a model over all ranks, and which ranks write each.

Every rank knows this without communication: a compiled model knows what the ranks of all meshes of
a pipeline hold. A parameter of several stages is written by the first of them; a parameter with
several keys (tied weights) is saved under the first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from ..errors import InputError, raise_all
from ..runtime.model.access import is_compiled, state_of
from ..runtime.model.overrides import overrides
from ..runtime.model.parallel_model import ParallelModel
from ..runtime.model.specialization import RankState
from ..runtime.parameters.refresh import renew
from ..runtime.parameters.sharded import ShardedParameter
from ..runtime.parameters.state_dicts import name_of
from ..runtime.world import here


class KeyOwners:
    """The keys of a model. `first` maps every key to the one it is saved under."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.rank, self.world = here().rank, here().size
        self.compiled = {
            _prefix(path): part
            for path, part in model.named_modules()
            if isinstance(part, ParallelModel) and is_compiled(part)
        }
        self.first: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}  # of the saved tensors, by first key
        self._writers: dict[str, tuple[int, ...]] = {}
        for prefix, part in self.compiled.items():
            self._count(prefix, state_of(part))
        self._count_rest()
        self._names = {id(parameter): key for key, parameter in model.named_parameters()}
        self._order = {key: at for at, key in enumerate(self.first)}

    def _count(self, prefix: str, holding: RankState) -> None:
        for mesh, specs in holding.pp_ranks or ((holding.groups.mesh, holding.specs),):
            for spec in specs:
                name = prefix + spec.name
                self.first.update({prefix + key: name for key in spec.keys})
                self.shapes[name] = spec.shape
                self._writers.setdefault(name, tuple(mesh.devices))
        for key, buffer in holding.saved_buffers.items():
            self.first[prefix + key] = prefix + key
            self.shapes[prefix + key] = tuple(buffer.shape)

    def _count_rest(self) -> None:
        seen: dict[int, str] = {}
        named = self._state(keep_vars=True)
        faults = [
            f"{key} is a {type(value).__name__}; save it with extra="
            for key, value in named.items()
            if not _is_tensor(value)
        ]
        for prefix, part in self.compiled.items():
            faults += [f"{prefix}{path}: get_extra_state is not saved; save it with extra=" for path in _extra_of(part)]
        raise_all(InputError, "the model's state dict has more than tensors:", faults)
        for key, value in named.items():
            if key not in self.first:
                self.first[key] = seen.setdefault(id(value), key)
                self.shapes[self.first[key]] = tuple(value.shape)

    def _state(self, **options: Any) -> dict[str, Any]:
        compiled = self.compiled.get("")
        return self.model.state_dict(**options) if compiled is None else compiled.shard_state_dict()

    @property
    def tied(self) -> dict[str, str]:
        """Keys that are saved under another."""
        return {key: first for key, first in self.first.items() if key != first}

    @property
    def speaks(self) -> bool:
        """Whether this rank reports its stage's values besides tensors: the first rank of each mesh does."""
        return self.rank == 0 or any(self.rank == ranks[0] for ranks in self._writers.values())

    def writes(self, name: str) -> bool:
        """Whether this rank holds the shard that is written, or an equal one."""
        return name not in self._writers or self.rank in self._writers[name]

    def source(self, name: str) -> int | None:
        """A rank that holds a parameter that not all ranks have."""
        ranks = self._writers.get(name, ())
        return ranks[0] if 0 < len(ranks) < self.world else None

    def tensors(self) -> dict[str, Tensor]:
        """This rank's shards of the model, by first key, sharing its memory."""
        values = self._state()
        return {key: value for key, value in values.items() if self.first[key] == key}

    def name_of(self, leaf: Any) -> str:
        """The key of a tensor that an optimizer updates."""
        if isinstance(leaf, ShardedParameter) or hasattr(leaf, "key"):
            return name_of(leaf)
        if id(leaf) not in self._names:
            raise InputError(
                f"the optimizer has a parameter of shape {tuple(leaf.shape)} that the model does not have; "
                "save its state with extra="
            )
        return self._names[id(leaf)]

    def sorted(self, names: set[str]) -> list[str]:
        return sorted(names, key=lambda name: (self._order.get(name, len(self._order)), name))

    def filled(self, names: Iterable[str]) -> None:
        """Note that these keys were loaded."""
        for prefix, part in self.compiled.items():
            state_of(part).filled({name.removeprefix(prefix) for name in names if name.startswith(prefix)})

    def renew(self) -> None:
        """Recompute low-precision parameters from the loaded master weights. All ranks must call it."""
        for part in self.compiled.values():
            renew(state_of(part).parameters.values())

    def check_ready(self) -> None:
        """Refuse a model on several ranks that is not compiled, and parameters on meta."""
        for part in self.compiled.values():
            state_of(part).check_filled()
        if self.world > 1 and not self.compiled and isinstance(self.model, ParallelModel):
            state_of(self.model)


def _extra_of(model: ParallelModel) -> list[str]:
    """The submodules that have an extra state, for which a compiled model has no place."""
    modules = model.root.named_modules() if model.root is not None else ()
    return [path for path, module in modules if overrides(type(module), "get_extra_state")]


def _prefix(path: str) -> str:
    return f"{path}." if path else ""


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)
