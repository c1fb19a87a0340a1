"""How a model is trained, as far as it costs time and memory."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import PlanError
from ..ir.graph import ITEM_SIZE, Value

STATES = {
    "none": 0,
    "sgd": 0,
    "momentum": 1,
    "rmsprop": 1,
    "adagrad": 1,
    "lion": 1,
    "adam": 2,
    "adamw": 2,
}
"""How many tensors of its own size an optimizer keeps for a parameter."""

MASTER = 4  # bytes of float32


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendTraits:
    """What the libraries of a device do with memory.

    copies     gathering and scattering work on a copy of the whole (gloo, between machines)
    foreach    the optimizer updates all parameters at once, with a temporary for each (torch on a GPU); else one
               after the other, Adam and AdamW by one kernel (`runtime/fused.py`)
    """

    copies: bool
    foreach: bool

    def fuses(self, optimizer: str) -> bool:
        """Whether an update of a parameter is one kernel, without temporaries."""
        return not self.foreach and optimizer in ("adam", "adamw")


ON_CPU = BackendTraits(copies=False, foreach=False)
ON_CPUS_APART = BackendTraits(copies=True, foreach=False)
ON_GPU = BackendTraits(copies=False, foreach=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSetup:
    """The optimizer, the precision, and how often gradients are made before they are used.

    optimizer       a key of STATES
    compute         the dtype in which float32 values are computed and parameters are gathered; None: as captured
    reduce          the dtype in which gradients are summed over devices; None: that of `compute`, or their own
    accumulate      how many times forward and backward run before one update
    masters         whether the optimizer updates float32 copies of parameters that are narrower
    matmul          the dtype in which linear layers multiply, where that is narrower than their inputs: "float8"
    precision_name  the precision as the user wrote it, to show
    margin          the part of a device's memory that fragmentation and the libraries take
    """

    optimizer: str = "adamw"
    compute: str | None = None
    reduce: str | None = None
    accumulate: int = 1
    masters: bool = False
    matmul: str | None = None
    precision_name: str = ""
    margin: float = 0.06

    def __post_init__(self) -> None:
        if self.optimizer not in STATES:
            raise PlanError(f"{self.optimizer!r} is no optimizer whose state is known; there are {', '.join(STATES)}")
        for dtype in (self.compute, self.reduce):
            if dtype is not None and dtype not in ITEM_SIZE:
                raise PlanError(f"{dtype!r} is no dtype; there are {', '.join(ITEM_SIZE)}")
        if self.accumulate < 1 or not 0 <= self.margin < 1:
            raise PlanError("accumulate is at least 1, and margin a part of 1")

    def dtype(self, value: Value) -> str:
        """The dtype that a value has while the program runs."""
        return self.compute if self.compute is not None and value.dtype == "float32" else value.dtype

    def item(self, value: Value) -> int:
        """Bytes of an element of a value while the program runs."""
        return ITEM_SIZE.get(self.dtype(value), 4)

    def reduced_item(self, parameter: Value) -> int:
        """Bytes of an element of a parameter's gradient on the wire."""
        return ITEM_SIZE.get(self.reduce or self.dtype(parameter), 4)

    def has_master(self, parameter: Value) -> bool:
        return self.masters and ITEM_SIZE.get(parameter.dtype, 4) < MASTER

    def true_item(self, parameter: Value) -> int:
        """Bytes of an element of a parameter's gradient, and of each tensor of the optimizer's state."""
        return MASTER if self.has_master(parameter) else ITEM_SIZE.get(parameter.dtype, 4)

    def state_item(self, parameter: Value) -> int:
        """Bytes that the optimizer keeps for an element of a parameter, its master included."""
        return self.states() * self.true_item(parameter) + (MASTER if self.has_master(parameter) else 0)

    def room(self, memory: float) -> float:
        """What of a device's memory can be used."""
        return memory * (1.0 - self.margin)

    def states(self) -> int:
        return STATES[self.optimizer]


def backend_traits(device: str, nodes: int) -> BackendTraits:
    """The traits of a device by its name, in a cluster of so many nodes."""
    if device != "cpu":
        return ON_GPU
    return ON_CPU if nodes == 1 else ON_CPUS_APART
