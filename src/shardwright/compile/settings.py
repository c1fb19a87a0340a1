"""What a model is compiled with: the options of `parallelize`, parsed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..options import CACHE_SIZE, GENERATED, Backward, BatchNorm, Opaque, Outputs
from ..plan.request import PlanRequest
from ..precision import Precision
from ..runtime.model.inputs import Mode
from ..runtime.model.reduction import LossReduction


@dataclass(frozen=True, kw_only=True)
class CompilerSettings:
    """The settings of a compiled model, the same for all its calls, and on all ranks.

    promote, exact_random   for a comparison: floats as float64, and random numbers drawn as on one device
    prefix                  where the module is in the user's, if it is a part of one
    """

    request: PlanRequest = field(default_factory=PlanRequest)
    inputs: Mode = "global"
    outputs: Outputs = "all"
    unbatched: Sequence[str] | None = None
    opaque: Opaque = "marked"
    batch_norm: BatchNorm = "global"
    precision: Precision = field(default_factory=Precision)
    backward: Backward = "inside"
    accumulate: int = 1
    reduction: LossReduction = "mean"
    seed: int = 0
    directory: Path = GENERATED
    promote: bool = False
    exact_random: bool = False
    prefix: str = ""
    cache_size: int = CACHE_SIZE
