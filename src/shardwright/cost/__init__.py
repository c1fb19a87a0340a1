"""What things cost: the arithmetic of an op, its time, its memory, what is sent."""

from .call import Call, Tensor, call_of, local_elements, work_parts
from .training import STATES, Training
from .work import flops, is_product

__all__ = [
    "STATES",
    "Call",
    "Tensor",
    "Training",
    "call_of",
    "flops",
    "is_product",
    "local_elements",
    "work_parts",
]
