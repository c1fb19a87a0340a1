"""Fresh values for a model that fits in no process: each rank draws one parameter at a time, and keeps its shard.

    model = parallelize(model_on_meta, example=batch)
    initialize(model, seed=0)

The model's own initialisation runs on fake tensors, where it costs nothing, and is recorded op by op. Then the record
is replayed on the CPU with one generator, in the same order, so that all values are those that one device draws; a
tensor is freed after the last op that needs it. Every rank draws everything: that takes the time of the whole model,
and the memory of its largest parameter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .capture import copy_module
from .errors import InputError
from .runtime.model.access import skeleton_of, state_of
from .runtime.model.parallel_model import ParallelModel
from .runtime.parameters.full_tensors import true_dtype
from .runtime.parameters.refresh import renew
from .runtime.parameters.sharded import Untouched, true_value
from .runtime.parameters.state_values import region_of_value

Init = Callable[[nn.Module], object]

_SHOWN = 6


def initialize(model: ParallelModel, init: Init | None = None, *, seed: int = 0) -> None:
    """Give the parameters of a compiled model that were on meta fresh values. All ranks call it.

    init   a function of the original model that initialises all of it in place: lambda net: net.apply(net.reset), say.
           By default a model of transformers initialises itself, and of others each module that has reset_parameters()
           calls it, in the order of model.modules(): for layers of torch that are made in that order, what
           torch.manual_seed(seed) before their construction gives.
    seed   of the generator: the values depend on it alone, not on the plan or the number of ranks.
    """
    state = state_of(model)
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    module = _fake_original(model, fakes)
    record = _recorded(module, init or own_init, fakes)
    keys: dict[int, list[str]] = {}
    for key, parameter in module.named_parameters(remove_duplicate=False):
        keys.setdefault(_storage(parameter), []).append(key)
    touched = {number for step in record for number in step.writes}
    left = [names[0] for number, names in keys.items() if number not in touched]
    if left:
        more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
        raise InputError(
            f"the initialisation gives {', '.join(left[:_SHOWN])}{more} no values: their modules have no "
            "reset_parameters(). Pass init=, a function that initialises the whole model in place"
        )
    parameters = dict(module.named_parameters(remove_duplicate=False))
    specs = {key: spec for spec in state.specs for key in spec.keys}
    for number, memory in _Replay(record, set(keys), torch.Generator().manual_seed(seed)):
        spec = next((specs[key] for key in keys[number] if key in specs), None)
        if spec is not None:
            true = true_value(state.parameters[spec.name])
            full = _Place.of(parameters[keys[number][0]]).view(memory)
            with torch.no_grad(), Untouched():
                true.copy_(region_of_value(full, spec, true.spread, state.groups))
    state.filled(parameters)
    renew(state.parameters.values())


def own_init(module: nn.Module) -> None:
    """What a model does to initialise itself, as far as it says so."""
    initialize_weights: Any = getattr(module, "initialize_weights", None)
    if initialize_weights is not None and hasattr(module, "_init_weights"):  # transformers
        for part in module.modules():
            vars(part).pop("_is_hf_initialized", None)
        initialize_weights()
        return
    for part in module.modules():
        for name in ("reset_parameters", "_reset_parameters"):
            reset = getattr(part, name, None)
            if callable(reset):
                reset()
                break


def _fake_original(model: ParallelModel, fakes: FakeTensorMode) -> nn.Module:
    """The original with fake tensors for values. Not on meta, where functions of torch.nn.init do nothing."""
    state, module = state_of(model), copy_module(skeleton_of(model))
    every = [spec for _, specs in state.pp_ranks for spec in specs] or state.specs
    dtypes = {key: true_dtype(spec) for spec in every for key in spec.keys}
    fake: dict[int, Any] = {}  # tied tensors stay tied
    for path, part in module.named_modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and id(tensor) not in fake:
                    dtype = dtypes.get(f"{path}.{name}" if path else name, tensor.dtype)
                    with fakes:
                        empty = torch.empty(tensor.shape, dtype=dtype)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    fake[id(tensor)] = (tensor, nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty)
                if tensor is not None:
                    tensors[name] = fake[id(tensor)][1]
    return module


# -- recording ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor is when an op sees it: later ops may transpose it in place."""

    number: int
    size: int  # of its storage, in bytes
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> _Place:
        size, shape, stride = tensor.untyped_storage().nbytes(), tuple(tensor.shape), tuple(tensor.stride())
        return cls(_storage(tensor), size, tensor.dtype, int(tensor.storage_offset()), shape, stride)

    def view(self, memory: torch.UntypedStorage) -> Tensor:
        """The tensor in memory that has values."""
        return torch.empty(0, dtype=self.dtype).set_(memory, self.offset, self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class _Step:
    """An op. Storages by number: what it uses, what it writes, and what it overwrites without having read it."""

    func: Any
    args: Any
    kwargs: dict[str, Any]
    results: list[_Place]
    uses: frozenset[int]
    writes: frozenset[int]
    overwrites: frozenset[int]


_FILLS = frozenset("normal uniform fill zero copy bernoulli exponential random".split())  # in place, of all elements


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every op that makes or changes a tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[_Step] = []
        self._alive: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        placed, named_places = pytree.tree_map_only(FakeTensor, _Place.of, (args, kwargs))
        result = func(*args, **kwargs)
        results = _tensors(result)
        self._alive.append((args, kwargs, result))  # storages are known by their addresses
        fakes = [tensor for tensor in _tensors((args, kwargs)) if isinstance(tensor, FakeTensor)]
        inputs = frozenset(map(_storage, fakes))
        names = [argument.name for argument in func._schema.arguments]
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        mutated = [
            tensor
            for argument in func._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(named.get(argument.name))
            if isinstance(tensor, FakeTensor)
        ]
        fresh = {_storage(tensor) for tensor in results} - inputs
        writes = {_storage(tensor) for tensor in mutated} | fresh
        if writes:  # else it is a view, or says something about a tensor
            others = {_storage(tensor) for tensor in fakes if not any(tensor is other for other in mutated)}
            filled = {_storage(tensor) for tensor in mutated if _is_fill(func) and _is_all(tensor)}
            overwrites = fresh | (filled - others)
            places = list(map(_Place.of, results))
            self.steps.append(
                _Step(func, placed, named_places, places, inputs | fresh, frozenset(writes), frozenset(overwrites))
            )
        return result


_TRUNCATED: Any = vars(nn.init)["_no_grad_trunc_normal_"]  # draws again what it rejects: one step of a record
_patching = threading.Lock()


@contextmanager
def _whole_truncation(recorder: _Recorder) -> Iterator[None]:
    """Within this, a truncated normal distribution is recorded as one step: it looks at what it has drawn."""

    def record(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        kwargs.pop("generator", None)
        number = frozenset({_storage(tensor)})
        filled = number if _is_all(tensor) else frozenset()
        recorder.steps.append(
            _Step(_TRUNCATED, (_Place.of(tensor), *args), kwargs, [_Place.of(tensor)], number, number, filled)
        )
        return tensor

    with _patching:
        vars(nn.init)["_no_grad_trunc_normal_"] = record
        try:
            yield
        finally:
            vars(nn.init)["_no_grad_trunc_normal_"] = _TRUNCATED


def _recorded(module: nn.Module, init: Init, fakes: FakeTensorMode) -> list[_Step]:
    recorder = _Recorder()
    try:
        with _whole_truncation(recorder), torch.no_grad(), fakes, recorder:
            init(module)
    except (NotImplementedError, RuntimeError, DataDependentOutputException) as error:
        raise InputError(
            f"the initialisation of {type(module).__name__} can't run without values: {error}. It must not look at "
            "values that it has drawn; initialise on one device and load the weights "
            "(shardwright.checkpoint.load_weights), or pass init="
        ) from error
    return recorder.steps


def _is_fill(func: Any) -> bool:
    name = str(func._schema.name).rpartition("::")[2]
    return name.endswith("_") and name[:-1] in _FILLS


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_all(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


# -- replaying ---------------------------------------------------------------------------------------


class _Replay:
    """Runs a record with values; gives each of the wanted storages, by number, when nothing more is done to it."""

    def __init__(self, steps: list[_Step], wanted: set[int], generator: torch.Generator) -> None:
        self._steps, self._wanted, self._generator = steps, wanted, generator
        self._memory: dict[int, torch.UntypedStorage] = {}
        self._last = {number: at for at, step in enumerate(steps) for number in step.uses}

    def __iter__(self) -> Iterator[tuple[int, torch.UntypedStorage]]:
        for at, (step, needed) in enumerate(zip(self._steps, self._kept(), strict=True)):
            self._run(step)
            for number in step.uses:
                if number in self._wanted and self._last[number] == at:
                    yield number, self._memory.pop(number)
                elif number not in needed:
                    self._memory.pop(number, None)

    def _kept(self) -> list[frozenset[int]]:
        """For each step, the storages whose values are needed after it."""
        needed, kept = set(self._wanted), []
        for step in reversed(self._steps):
            kept.append(frozenset(needed & step.uses))
            needed -= step.overwrites
            needed |= step.uses - step.overwrites
        return kept[::-1]

    def _run(self, step: _Step) -> None:
        func, kwargs = step.func, {**step.kwargs}
        if func is not _TRUNCATED:
            arguments = {argument.name for argument in func._schema.arguments}
            if "generator" not in arguments and "generator" in func.overloadpacket.overloads():
                func, arguments = func.overloadpacket.generator, arguments | {"generator"}
        if func is _TRUNCATED or "generator" in arguments:
            kwargs["generator"] = self._generator
        args, kwargs = pytree.tree_map_only(_Place, self._real, (step.args, kwargs))
        for place, real in zip(step.results, _tensors(func(*args, **kwargs)), strict=True):
            if place.number not in self._memory:
                self._real(place).copy_(real)

    def _real(self, place: _Place) -> Tensor:
        if place.number not in self._memory:
            self._memory[place.number] = torch.empty(place.size, dtype=torch.uint8).untyped_storage()
        return place.view(self._memory[place.number])
