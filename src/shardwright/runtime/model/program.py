"""The class that generated programs derive from: parameters by their names, groups, constants.

A generated file holds one class. Loading it gives an object on which the user's names work
(`self.blocks[0].attn.qkv.weight`), the groups of the mesh are attributes (`self.tp`), and
`forward` is a plain function of tensors. What wraps it for the user's loop is `parallel_model.py`.
"""

from __future__ import annotations

import ast
import linecache
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwright.errors import InputError, LayoutError, LoweringError
from shardwright.layout import Reduction, Shard
from shardwright.layout import chunk_bounds as share_of

from ..algorithms.experts import experts
from ..algorithms.norms import batch_norm, expect_values, of_first_rank
from ..algorithms.random import Randomness
from ..algorithms.weight_gradients import WeightGradientQueue
from ..parameters.sharded import Untouched
from ..parameters.zero3 import UnitGatherer
from ..world import Group, Groups, Moment
from .methods import running
from .pinned import ADDED, pin

_HOMES = {"torch": torch, "F": F}
_CALL = re.compile(r"\b(torch|F)\.(\w+)\(")


def local_size(size: int, group: Group) -> int:
    """This rank's share of a size that need not divide."""
    return share_of(size, group.size, group.index)[1]


class Submodule:
    """A part of the model: attributes are its children, numbered children make it a list."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __str__(self) -> str:
        return self._path

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):  # by number: a stage holds some of the layers only
            return [self.__dict__[str(number)] for number in range(key.start or 0, key.stop, key.step or 1)]
        return self.__dict__[str(key)]

    def __iter__(self) -> Iterator[Any]:
        numbers = sorted(int(name) for name in self.__dict__ if name.isdigit())
        return iter([self.__dict__[str(number)] for number in numbers])


class OpaqueSubmodule(Protocol):
    """A submodule that stays as it is, for one call in the program."""

    path: str
    names: tuple[str, ...]  # of its parameters and buffers

    def __call__(self, tensors: Sequence[Tensor], state: Mapping[str, Tensor]) -> tuple[Tensor, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PrologueCount:
    """A number that all microbatches need and no parameter goes into, such as the labels that count."""

    name: str  # forward finds it as `self.known.<name>`
    over: str | None = None  # the attribute of the stage that is the group to reduce over
    op: Reduction = "sum"  # over microbatches and over the group


class Program:
    """The program of a rank. Generated code fills in `constants` and `forward`."""

    counts: tuple[PrologueCount, ...] = ()  # what `prologue` returns, in order

    def __init__(
        self,
        groups: Groups,
        wanted: Sequence[str],
        device: torch.device,
        random: Randomness,
        moment: Moment | None = None,
    ) -> None:
        self.device = device
        self.mb = moment if moment is not None else Moment(1)
        self.known = SimpleNamespace()
        self.weights = WeightGradientQueue()
        self.random = random
        self.fixed = SimpleNamespace()
        self.module = Submodule("")
        self.updates: dict[str, Tensor] = {}
        self._of_first: dict[str, Group] = {}  # updates that only the first rank of a group decides
        self.zero: UnitGatherer | None = None
        self.parts: dict[str, OpaqueSubmodule] = {}
        self._unchanging: list[Tensor] = []  # buffers that constants may have been computed of
        self._versions: list[int] | None = None  # of those, when constants were computed
        self._opened: dict[str, tuple[str, ...]] = {}  # the keys of units that are gathered now
        self._lent: frozenset[str] = frozenset()  # units that are open around the region that runs
        self._recomputing = False  # the region that runs ran before, in forward
        for name in wanted:
            setattr(self, name, groups[tuple(name.split("_"))])
        self._own = frozenset(self.__dict__)  # what no part of the model may stand in the place of
        self.sizes()

    def sizes(self) -> None:
        """Sizes that differ between ranks."""

    def constants(self) -> None:
        """What is computed once."""

    def renew(self) -> None:
        """Compute the constants, and again if a buffer has changed since: loaded, or trained by another program."""
        versions = [buffer._version for buffer in self._unchanging]
        if versions != self._versions:
            with torch.inference_mode(False), torch.no_grad(), Untouched(), torch.device(self.device):
                self.constants()
            self._versions = versions

    def prologue(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """This rank's `counts` of the microbatch that runs."""
        return ()

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def place(self, key: str, tensor: Tensor | None, unchanging: bool = False) -> None:
        """Put a tensor where the program looks for it; `unchanging` if this program never changes it."""
        if unchanging and tensor is not None:
            self._unchanging.append(tensor)
        *path, last = key.split(".")
        at = self.module
        for part in path:
            if part not in at.__dict__:
                setattr(at, part, Submodule(f"{at}.{part}".lstrip(".")))
                if at is self.module and self._is_free(part):
                    self.__dict__[part] = at.__dict__[part]
            at = at.__dict__[part]
        setattr(at, last, tensor)
        if not path and self._is_free(last):
            self.__dict__[last] = tensor

    def _is_free(self, name: str) -> bool:
        """Whether a part of the model may be an attribute of this name; else it is found in `module` only."""
        return name not in self._own and not hasattr(type(self), name)

    def start(self) -> None:
        """A forward begins: whatever the last one left open is not."""
        self._opened.clear()
        self._of_first.clear()

    @contextmanager
    def gathered(self, unit: Submodule | str) -> Iterator[None]:
        """Within this the parameters of a layer are whole; ZeRO-3 gathers them before it and lets them go after it."""
        self.open(unit)
        try:
            yield
        finally:
            self.close(unit)

    def open(self, unit: Submodule | str) -> None:
        """Gather the parameters of a unit that are stored split, until `close`, or to the end of backward."""
        if self.zero is not None and str(unit) not in self._lent:
            gathered = self.zero.open(str(unit))
            self._opened[str(unit)] = tuple(gathered)
            for key, tensor in gathered.items():
                self.place(key, tensor)

    def close(self, unit: Submodule | str) -> None:
        """Let them go again."""
        if self.zero is not None and str(unit) not in self._lent:
            self.zero.close(str(unit))
            for key in self._opened.pop(str(unit), ()):
                self.place(key, None)

    @contextmanager
    def region(self) -> Iterator[None]:
        """Around a recompute region. In forward it uses what is open already; in backward it opens all it needs.

        What it opens it releases at its end, which in backward may be sooner than its text says: torch stops it once
        everything that was asked for is there.
        """
        opened, lent, recomputing = self._opened, self._lent, self._recomputing
        self._recomputing = torch._C._current_graph_task_id() != -1
        self._opened, self._lent = {}, frozenset() if self._recomputing else lent | opened.keys()
        try:
            yield
        finally:
            for unit in tuple(self._opened):
                self.close(unit)
            self._opened, self._lent, self._recomputing = opened, lent, recomputing

    def opaque(
        self, key: str, *tensors: Tensor, state: Mapping[str, Tensor] | None = None, over: Group | None = None
    ) -> Any:
        """Call a part of the user's model that stays as it is, with the parameters and buffers of this program.

        All ranks draw the same random numbers in it, unless its samples are split over a group.
        """
        part = self.parts[key]
        passed = state or {}
        lead = f"{part.path}." if part.path else ""
        tensors_of_part = {name: passed[name] if name in passed else self.at_key(lead + name) for name in part.names}
        where = "" if over is None else f" {over.axes} {over.index}"
        with self.random.drawing(key + where):
            outputs = part(tensors, tensors_of_part)
        return outputs[0] if len(outputs) == 1 else outputs

    def experts(
        self, key: str, hidden: Tensor, index: Tensor, weights: Tensor, *, expert_axes: Group, sharding: Shard,
        state: Mapping[str, Tensor] | None = None, over: Group | None = None,
    ) -> Any:  # fmt: skip
        """Call a layer of experts of which every rank of a group has some: tokens go to where their experts are."""

        def layer(tokens: Tensor, numbers: Tensor, shares: Tensor) -> Tensor:
            output: Tensor = self.opaque(key, tokens, numbers, shares, state=state, over=over)
            return output

        return experts(layer, hidden, index, weights, expert_axes, sharding)

    def at_key(self, key: str) -> Tensor:
        """The tensor that was placed under a key."""
        value: Any = self.module
        for step in key.split("."):
            value = value[step]
        return value  # type: ignore[no-any-return]

    def update(self, key: str, value: Tensor) -> None:
        """A new value for a buffer or a parameter, written once the forward is over. A recomputation has none."""
        if not self._recomputing:
            self.updates[key] = value.detach()

    def batch_norm(
        self, x: Tensor, module: Any, *, momentum: float, eps: float, over: Group | None = None, local: bool = False
    ) -> Tensor:
        """A batch norm in training, over the samples of all ranks of a group; the module's buffers are updated.

        local   over this rank's samples alone; when the forward is over all ranks have the buffers of the first
        """
        self.update(f"{module}.num_batches_tracked", module.num_batches_tracked + 1)
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        if local:
            expect_values(x)
        group = None if local else over
        y, mean, var = batch_norm(x, weight, bias, module.running_mean, module.running_var, momentum, eps, group)
        assert mean is not None and var is not None  # they are there to be tracked
        if local and over is not None and not self._recomputing:
            self._of_first |= {f"{module}.{name}": over for name in ("running_mean", "running_var")}
        self.update(f"{module}.running_mean", mean)
        self.update(f"{module}.running_var", var)
        return y


    def share_local_statistics(self) -> None:
        """Before updates are written: statistics of a rank's own samples become those of the first, in one message."""
        groups = {group.axes: group for group in self._of_first.values()}
        for axes, group in groups.items():
            keys = [key for key, over in self._of_first.items() if over.axes == axes]
            self.updates |= dict(zip(keys, of_first_rank([self.updates[key] for key in keys], group), strict=True))
        self._of_first.clear()


def recompute(method: Callable[..., Any], *inputs: Any) -> Any:
    """Run a method now and again in backward, with the same random numbers, instead of keeping its insides."""
    stage: Program = method.__self__  # type: ignore[attr-defined]
    step, microbatch = stage.random.step, stage.random.microbatch

    def run(*again: Any) -> Any:
        with stage.random.at(step, microbatch), torch._C.DisableTorchFunctionSubclass(), stage.region():
            return method(*again)

    return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)


def load_text(text: str, path: Path, name: str) -> ModuleType:
    """Run the text of a generated file as a module. Tracebacks and debuggers show its lines under `path`.

    It is the text at hand that runs, whatever lies at `path`: the import machinery would rather take bytecode from
    `__pycache__`, which it does not compare with the source and which somebody else may have put there.
    """
    file = str(path.absolute())
    module = ModuleType(name)
    module.__file__ = file
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)  # no mtime: never read again
    sys.modules[name] = module
    exec(compile(text, file, "exec", dont_inherit=True), vars(module))
    _check_functions(text, path)
    return module


def _check_functions(text: str, path: Path) -> None:
    """Refuse a call of a function that torch does not have now, and not in the first step."""
    unknown = {call for call in _CALL.findall(text) if not hasattr(_HOMES[call[0]], call[1])}
    if not unknown:  # else it may be a comment
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and (ast.unparse(node.value), node.attr) in unknown:
            raise LoweringError(
                f"{path}, line {node.lineno}: torch {torch.__version__} has no {ast.unparse(node)}. Give the op "
                f"{node.attr} in ops/ a printer of its own with a `reads` that agrees (instead of `prints=function`), "
                "or no `prints`"
            )


def program_class(module: ModuleType) -> type[Program]:
    """The class that a generated file defines."""
    for member in vars(module).values():
        if isinstance(member, type) and issubclass(member, Program) and member is not Program:
            return member
    raise LayoutError(f"{module.__name__} defines no stage")


def shown(original: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """The modules of the original, as what they are and with their attributes, holding other tensors.

    Names, classes, `training` and state dicts stay what they were. Only calling a part on its own is
    refused: it would compute with shards as if they were whole.
    """
    memo: dict[int, nn.Module] = {}
    root = _shown(original, "the model", memo)
    for key, tensor in tensors.items():
        path, _, last = key.rpartition(".")
        at = root.get_submodule(path)
        if isinstance(tensor, nn.Parameter):
            at._parameters[last] = tensor
        else:
            at._buffers[last] = tensor
    for (path, module), like in zip(root.named_modules(), original.modules(), strict=True):
        every = {**like._parameters, **like._buffers}
        absent = frozenset(name for name, tensor in every.items() if tensor is None)
        pin(module, path, absent, vars(root).setdefault(ADDED, []))
    return root


def _shown(original: nn.Module, name: str, memo: dict[int, nn.Module]) -> nn.Module:
    if id(original) not in memo:
        module = memo[id(original)] = type(original).__new__(type(original))
        nn.Module.__init__(module)
        own = {key: value for key, value in vars(original).items() if key not in vars(module) or key == "training"}
        vars(module).update(own, forward=partial(_refuse, name))
        module._parameters.update(dict.fromkeys(original._parameters))  # None for those that are held elsewhere
        module._buffers.update(dict.fromkeys(original._buffers))
        for key, child in original._modules.items():
            inner = key if name == "the model" else f"{name}.{key}"
            module._modules[key] = None if child is None else _shown(child, inner, memo)
    return memo[id(original)]


def _refuse(name: str, *args: Any, **kwargs: Any) -> Any:
    method = running()
    if method is not None:
        method.touch(f"calls {name}")
    raise InputError(
        f"{name} is a part of a parallelized model and holds shards: it can't be called on its own; call the whole "
        f"model or a method of it that calls the part, or parallelize the part by itself"
    )
