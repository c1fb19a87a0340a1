"""Options that belong together, as one object: `pipeline=PipelineOptions(microbatches=8)`.

They are the same wherever a model is compiled (`parallelize`, `plan`, `verify`, `rehearse`, `Trainer`, the Lightning
strategy). A dict with the same keys will do, as it comes from a config file. An option that used to be a keyword by
itself is refused with its new place (`refuse_moved`): no script may lose an option without an error.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar, cast

from .errors import InputError, meant

Backward = Literal["inside", "outside"]
Opaque = Literal["marked", "auto"]
Outputs = Literal["all", "scalars"]
Semantics = Literal["global", "local"]
BatchNorm = Literal["global", "local"]

GENERATED = Path(".shardwright")
CACHE_SIZE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """How a batch goes through a pipeline.

    microbatches  how many parts of a batch go through it one after the other; without it a plan string takes about
                  four a stage, and "auto" searches
    semantics     "global": the step is that of the whole batch; "local": each microbatch is a batch of its own, and
                  losses are averaged (for models that can't be cut, such as those with batch norm)
    backward      "inside" the call of the model, seeded by its loss, which keeps few microbatches alive; "outside":
                  when backward of anything made of its outputs runs
    """

    microbatches: int | None = None
    semantics: Semantics = "global"
    backward: Backward = "inside"

    def __post_init__(self) -> None:
        if self.microbatches is not None and self.microbatches < 1:
            raise InputError(f"pipeline.microbatches={self.microbatches} makes no sense; use 1 for none")
        _check_choice("pipeline.semantics", self.semantics, ("global", "local"))
        _check_choice("pipeline.backward", self.backward, ("inside", "outside"))
        if self.semantics == "local" and self.microbatches is None:
            raise InputError('pipeline.semantics="local" needs to know how many microbatches there are: microbatches=4')

    @property
    def local(self) -> bool:
        return self.semantics == "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """What is compiled, and where it goes.

    directory   where generated code is written; None: .shardwright, or wherever the caller keeps it
    outputs     "all": every rank gets all outputs; "scalars": only the loss and the like (logits stay sharded); None:
                "all", in a Trainer "scalars"
    unbatched   names of the inputs that have no batch dim, such as ["mask"]; without it sizes tell, see docs/data.md
    opaque      "marked": submodules given to sw.opaque stay as they are; "auto": also the smallest submodules that
                can't be captured, with a warning
    parts       compile only these submodules, each at its first call, inside of the model, which stays an ordinary
                module: a list of paths, or a dict of paths and plans
    batch_norm  "global": batch norms in training take the statistics of the global batch, as on one device; "local":
                each rank those of its own samples, as with DDP, which sends less; see docs/training.md
    cache_size  how many specializations are kept, one for each kind of call (shapes, training or not); past that the
                one unused for longest is dropped, and compiled again if its call comes back
    timeout     seconds that ranks wait for each other before a run fails
    """

    directory: str | Path | None = None
    outputs: Outputs | None = None
    unbatched: Sequence[str] | None = None
    opaque: Opaque = "marked"
    parts: Sequence[str] | Mapping[str, Any] | None = None
    batch_norm: BatchNorm = "global"
    cache_size: int = CACHE_SIZE
    timeout: float = 600.0

    def __post_init__(self) -> None:
        if self.cache_size < 2:
            raise InputError(f"compile.cache_size={self.cache_size} makes no sense; training and evaluation take two")
        if self.outputs is not None:
            _check_choice("compile.outputs", self.outputs, ("all", "scalars"))
        _check_choice("compile.opaque", self.opaque, ("marked", "auto"))
        _check_choice("compile.batch_norm", self.batch_norm, ("global", "local"))


Options = TypeVar("Options")


def read_options(kind: type[Options], value: Options | Mapping[str, Any] | None) -> Options:
    """Options as somebody passed them: the object, a dict of its fields, or nothing."""
    if value is None:
        return kind()
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise InputError(f"{value!r} is no {kind.__name__}; pass {kind.__name__}(...), or a dict of its fields")
    known = [field.name for field in fields(cast(Any, kind))]
    strange = [str(name) for name in value if name not in known]
    if strange:
        raise InputError(f"{kind.__name__} has no {', '.join(strange)}; it has {', '.join(known)}")
    return kind(**value)


def expect_only(options: Any, names: Sequence[str], where: str, why: str) -> None:
    """Refuse options that have no effect at a place, instead of ignoring them."""
    usual = type(options)()
    for field in fields(options):
        if field.name not in names and getattr(options, field.name) != getattr(usual, field.name):
            raise InputError(f"{type(options).__name__}({field.name}=...) is not for {where}: {why}; leave it out")


# -- options that have moved -----------------------------------------------------------------------

KINDS = {
    "pipeline": "sw.PipelineOptions",
    "compile": "sw.CompileOptions",
    "loader": "sw.train.LoaderOptions",
    "logging": "sw.train.LoggingOptions",
    "optimization": "sw.train.OptimizationOptions",
    "validation": "sw.train.ValidationOptions",
}
"""The groups of options, and what makes them."""

MOVED = {
    "microbatches": "pipeline.microbatches",
    "microbatch_semantics": "pipeline.semantics",
    "backward": "pipeline.backward",
    "directory": "compile.directory",
    "outputs": "compile.outputs",
    "unbatched": "compile.unbatched",
    "opaque": "compile.opaque",
    "parts": "compile.parts",
    "timeout": "compile.timeout",
}
"""Keywords of `parallelize`, `plan`, `verify` and `rehearse` that are in a group now."""


def moved_in_python(name: str, places: Mapping[str, str]) -> str:
    """The new place of a keyword, as Python writes it."""
    group, _, field = places[name].partition(".")
    return f"{name}= is now {group}={KINDS[group]}({field}=...)"


def check_moved(names: Sequence[str], places: Mapping[str, str], where: str) -> None:
    """Refuse keywords that have moved into a group, all at once."""
    moved = [moved_in_python(name, places) for name in names if name in places]
    if moved:
        raise InputError(f"{where}: {'; '.join(moved)}")


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def refuse_moved(
    where: str, places: Mapping[str, str]
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """A function that names the new place of a keyword that it used to take, and the nearest to one it never took."""

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        known = [name for name in inspect.signature(function).parameters if name != "self"]

        @functools.wraps(function)
        def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            check_moved(list(kwargs), places, where)
            strange = [f"{name}={meant(name, known)}" for name in kwargs if name not in known]
            if strange:
                raise TypeError(f"{where} takes no {', '.join(strange)}")
            return function(*args, **kwargs)

        return call

    return decorate


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise InputError(f"{name}={value!r} is not known; use {' or '.join(map(repr, choices))}")
