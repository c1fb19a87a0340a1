"""A LightningModule whose call is one of its steps, captured in place of `forward`.

    steps = stepping(module, book)
    steps("training_step", batch)   ->   {"result": loss, "effects": {...}}

`stepping` returns an object of a subclass of the user's class that shares modules and parameters with
the original, so that keys and names stay. In a step `self(x)` is the user's forward. What a step reads
from the trainer differs from call to call but would be constant in a program: that is refused.
"""

from __future__ import annotations

import copy
from collections import UserDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import CaptureError
from .effects import Append, EffectLog, Untouchable, note_log, noting

ADVICE = (
    "it would be constant in a compiled step; compute it outside of the step, or compile only the heavy submodules and "
    "run the step eagerly: ShardwrightStrategy(parts=[...])"
)
SLOTS = ("_parameters", "_buffers", "_modules")
CONTAINERS = (list, dict, set, deque)


def _why(what: str, step: str) -> str:
    return f"{step} uses {what}, which differs from call to call: {ADVICE}"


def _refused(name: str) -> Any:
    def get(self: Any) -> NoReturn:
        raise CaptureError(_why(f"self.{name}", self._book.step))

    return property(get)


class Unknown(Untouchable):
    """An argument of a step that can't be constant in a program, such as the batch index."""

    def __init__(self, name: str, step: str) -> None:
        super().__init__(_why(name, step))


class StepEffects(EffectLog):
    """The recorded effects, and the name of the step being captured."""

    step: str = "the step"


class Stepping(LightningModule):
    """Base of the subclass of the user's class. `forward` is a step from outside, and the user's forward in a step."""

    _book: StepEffects
    _original: ClassVar[type[LightningModule]]

    trainer = _refused("trainer")
    current_epoch = _refused("current_epoch")
    global_step = _refused("global_step")
    logger = _refused("logger")
    loggers = _refused("loggers")
    optimizers = _refused("optimizers")
    lr_schedulers = _refused("lr_schedulers")
    global_rank = _refused("global_rank")
    local_rank = _refused("local_rank")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._book.captured is not None:
            return self._original.forward(self, *args, **kwargs)
        return _run(self, *args)

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        note_log(self._book, "log", (name,), value, _options(args) | kwargs)

    def log_dict(self, dictionary: Any, *args: Any, **kwargs: Any) -> None:
        note_log(self._book, "log_dict", (), dictionary, _options(args) | kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """The modules are copied; plain attributes that hold no tensors (a dataset) are shared."""
        copied = memo[id(self)] = type(self).__new__(type(self))
        for name, value in vars(self).items():
            plain = name not in SLOTS and not _holds_tensors(value)
            vars(copied)[name] = _shared(value) if plain else copy.deepcopy(value, memo)
        vars(copied)["_device"] = torch.device("cpu")  # where a step is traced
        return copied


LOG_OPTIONS = (  # in the order in which self.log and self.log_dict take them
    "prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist", "sync_dist_group",
    "add_dataloader_idx", "batch_size",
)  # fmt: skip


def _options(args: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(LOG_OPTIONS[: len(args)], args, strict=True))


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_holds_tensors(item) for item in value)
    if isinstance(value, Mapping):
        return any(_holds_tensors(item) for item in value.values())
    return isinstance(value, Tensor | nn.Module)


def _shared(value: Any) -> Any:
    """A plain attribute for the copy: containers are copied, so that capture does not change the original's."""
    return copy.copy(value) if type(value) in CONTAINERS else value


def stepping(module: LightningModule, book: StepEffects) -> LightningModule:
    """The module as a callable that takes the name of a step and its arguments."""
    original = type(module)
    kind = type(original.__name__, (Stepping, original), {"__module__": original.__module__, "_original": original})
    stand_in: LightningModule = object.__new__(kind)
    vars(stand_in).update(vars(module), _trainer=None, _book=book)
    return stand_in


def _run(
    module: Stepping, step: str, batch: Any, odd: Sequence[int], places: Mapping[str, Any]
) -> dict[str, Any]:  # fmt: skip
    """Run a step and record its effects. `places` has its other arguments by name; None means unknown."""
    book, before = module._book, Attributes(module)
    book.step, book.captured = step, {}
    rest = {name: Unknown(name, step) if value is None else value for name, value in places.items()}
    try:
        with noting(module, book):
            result = _method(module, step)(_with_unknown(batch, odd, step), *rest.values())
        for name, appended in before.appended(step):
            book.note(Append(name), appended)
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Untouchable):
                leaf._look()
        return {"result": result, "effects": book.captured}
    finally:
        before.restore()
        book.captured = None


def _method(module: Stepping, step: str) -> Callable[..., Any]:
    if step == "forward":
        return lambda inputs: module._original.forward(module, *inputs[0], **inputs[1])
    method: Callable[..., Any] = getattr(module, step)
    return method


class Attributes:
    """The plain attributes of a module before a step. It may append to lists; other changes would happen only once."""

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._attributes = {name: value for name, value in vars(module).items() if name not in SLOTS}
        self._before = {name: copy.copy(value) for name, value in self._attributes.items() if type(value) in CONTAINERS}

    def appended(self, step: str) -> Iterator[tuple[str, Any]]:
        """The appended values by list. Refuses a step that has changed anything else."""
        after = {name: value for name, value in vars(self._module).items() if name not in SLOTS}
        changed = {
            name for name, value in after.items() if name not in self._attributes or self._attributes[name] is not value
        }
        grown: list[tuple[str, Any]] = []
        for name, before in self._before.items():
            now, then = _parts(self._attributes[name]), _parts(before)
            kept = len(now) >= len(then) and all(a is b for a, b in zip(now, then, strict=False))
            if not kept or (len(now) > len(then) and type(before) is not list):
                changed.add(name)
            grown += [(name, value) for value in now[len(then) :]]
        if changed:
            some = ", ".join(f"self.{name}" for name in sorted(changed))
            raise CaptureError(
                f"{step} sets {some}, impossible in a compiled step: return it, append it to a list, make it a buffer "
                "(register_buffer), or run the step eagerly with ShardwrightStrategy(parts=[...])"
            )
        return iter(grown)

    def restore(self) -> None:
        """Restore the attributes as before the step."""
        for name in [name for name in vars(self._module) if name not in SLOTS and name not in self._attributes]:
            del vars(self._module)[name]
        vars(self._module).update(self._attributes)
        for name, before in self._before.items():
            value: Any = self._attributes[name]
            if len(_parts(value)) != len(_parts(before)):
                value.clear()
                (value.extend if isinstance(value, list | deque) else value.update)(before)


def _parts(value: Any) -> list[Any]:
    """The items of a container, for comparing by identity."""
    return [part for pair in value.items() for part in pair] if isinstance(value, dict) else list(value)


def without_text(batch: Any) -> tuple[Any, tuple[int, ...]]:
    """A batch without text and other objects, each of which would need a specialization, and their positions."""
    _register(batch)
    leaves, spec = pytree.tree_flatten(batch)
    odd = tuple(at for at, leaf in enumerate(leaves) if not isinstance(leaf, Tensor | int | float | None))
    return pytree.tree_unflatten([None if at in odd else leaf for at, leaf in enumerate(leaves)], spec), odd


def _register(batch: Any) -> None:
    """Register dict-like classes with torch's pytrees, such as the BatchEncoding of transformers."""
    kind = type(batch)
    if isinstance(batch, UserDict) and kind not in pytree.SUPPORTED_NODES:
        pytree.register_pytree_node(
            kind,
            lambda cache: (list(cache.data.values()), list(cache.data)),
            lambda values, keys: kind(dict(zip(keys, values, strict=True))),
            flatten_with_keys_fn=lambda cache: (
                [(pytree.MappingKey(k), v) for k, v in cache.data.items()],
                list(cache.data),
            ),
        )
    inner = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    for cache in inner:
        _register(cache)


def _with_unknown(batch: Any, odd: Sequence[int], step: str) -> Any:
    leaves, spec = pytree.tree_flatten(batch)
    for at in odd:
        leaves[at] = Unknown("something in the batch that is neither a tensor nor a number", step)
    return pytree.tree_unflatten(leaves, spec)
