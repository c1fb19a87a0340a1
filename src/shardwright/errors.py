"""What can go wrong, as one tree.

    ShardwrightError
    ├── CaptureError       the model can't be turned into a graph
    ├── GraphError         a graph breaks its own rules (a fault of ours or of an own pass)
    ├── RuleError          a rule is malformed, or claims a split that is not true
    ├── LayoutError        a layout or a mesh makes no sense for a shape
    ├── ClusterError       a cluster's name, file or facts make no sense
    ├── PlanError          a plan is malformed, infeasible, or made for another graph
    ├── ScheduleError      a schedule is malformed, can't run, or keeps too much
    ├── LoweringError      a plan can't be turned into a program
    ├── InputError         what was passed at run time does not fit the program
    ├── CheckpointError    a checkpoint is damaged, half written, or of something else
    ├── ParityError        the compiled program differs from the original
    ├── DriftError         ranks have different values of what should be equal
    ├── NonFiniteError     a loss, a value or a gradient is infinite or not a number
    └── RankError          another rank failed or was lost

Messages carry the op, the value with its shape, the user's source line, the numbers
that clash, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Sequence


class ShardwrightError(Exception):
    """The root of every error that shardwright raises on purpose."""


class CaptureError(ShardwrightError):
    """The model can't be turned into a graph. `path` is the submodule that stands in the way, if it is known."""

    def __init__(self, message: str, path: str | None = None) -> None:
        super().__init__(message)
        self.path = path


class GraphError(ShardwrightError):
    """A graph breaks its own rules."""


class RuleError(ShardwrightError):
    """A rule is malformed, or claims a split that is not true."""


class LayoutError(ShardwrightError):
    """A layout or a mesh makes no sense for a shape."""


class ClusterError(ShardwrightError):
    """A cluster's name, file or facts make no sense."""


class PlanError(ShardwrightError):
    """A plan is malformed, infeasible, or made for another graph."""


class ScheduleError(ShardwrightError):
    """A schedule is malformed, can't run, or keeps too much."""


class LoweringError(ShardwrightError):
    """A plan can't be turned into a program."""


class InputError(ShardwrightError):
    """What was passed at run time does not fit the program."""


class CheckpointError(ShardwrightError):
    """A checkpoint is damaged, half written, or of something else."""


class ParityError(ShardwrightError):
    """The compiled program differs from the original."""


class DriftError(ShardwrightError):
    """Ranks have different values of what should be equal."""


class NonFiniteError(ShardwrightError):
    """A loss, a value or a gradient is infinite or not a number."""


class RankError(ShardwrightError):
    """Another rank failed or was lost."""


def raise_all(kind: type[ShardwrightError], title: str, faults: Sequence[str]) -> None:
    """Raise one error that lists every fault, or return if there is none."""
    if faults:
        raise kind("\n".join([title, *(f"  - {fault}" for fault in faults)]))
