"""The tree of exceptions.

    ShardwrightError
    ├── CaptureError       the model can't be turned into a graph
    ├── GraphError         a graph is malformed (a bug, or a fault of a custom pass)
    ├── RuleError          a rule is malformed, or claims a split that is wrong
    ├── LayoutError        a layout or a mesh does not fit a shape
    ├── ClusterError       a cluster's name, file or numbers are invalid
    ├── PlanError          a plan is malformed, infeasible, or made for another graph
    ├── ScheduleError      a schedule is malformed, can't run, or needs too much memory
    ├── LoweringError      a plan can't be turned into a program
    ├── InputError         an argument is invalid, or does not fit the program
    ├── CheckpointError    a checkpoint is damaged, incomplete, or of another model
    ├── ParityError        the compiled program differs from the original
    ├── DriftError         values that should be equal on all ranks differ
    ├── NonFiniteError     a loss, a value or a gradient is inf or nan
    └── RankError          another rank failed or was lost

Messages carry the op, the value with its shape, the user's source line, the numbers
that clash, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


class ShardwrightError(Exception):
    """The root of every error that shardwright raises on purpose."""


class CaptureError(ShardwrightError):
    """The model can't be turned into a graph. `path` is the submodule at fault, if known."""

    def __init__(self, message: str, path: str | None = None) -> None:
        super().__init__(message)
        self.path = path


class GraphError(ShardwrightError):
    """A graph is malformed."""


class RuleError(ShardwrightError):
    """A rule is malformed, or claims a split that is wrong."""


class LayoutError(ShardwrightError):
    """A layout or a mesh does not fit a shape."""


class ClusterError(ShardwrightError):
    """A cluster's name, file or numbers are invalid."""


class PlanError(ShardwrightError):
    """A plan is malformed, infeasible, or made for another graph."""


class ScheduleError(ShardwrightError):
    """A schedule is malformed, can't run, or needs too much memory."""


class LoweringError(ShardwrightError):
    """A plan can't be turned into a program."""


class InputError(ShardwrightError):
    """An argument is invalid, or does not fit the program."""


class CheckpointError(ShardwrightError):
    """A checkpoint is damaged, incomplete, or of another model."""


class ParityError(ShardwrightError):
    """The compiled program differs from the original."""


class DriftError(ShardwrightError):
    """Values that should be equal on all ranks differ."""


class NonFiniteError(ShardwrightError):
    """A loss, a value or a gradient is inf or nan."""


class RankError(ShardwrightError):
    """Another rank failed or was lost."""


def raise_all(kind: type[ShardwrightError], title: str, faults: Sequence[str]) -> None:
    """Raise one error that lists every fault, or return if there is none."""
    if faults:
        raise kind("\n".join([title, *(f"  - {fault}" for fault in faults)]))


def meant(word: str, words: Iterable[str]) -> str:
    """The known word that was probably meant, as the end of a sentence; "" if none is near."""
    near = get_close_matches(word, list(words), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""
