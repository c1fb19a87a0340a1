"""What things cost: the arithmetic of an op, its time, its memory, what is sent."""

from .call import Call, Tensor, call_of, local_elements, work_parts
from .sends import Send, algorithm_sends
from .time import OpTime, join_time, op_time, update_time
from .training import STATES, Training
from .work import flops, is_product

__all__ = [
    "STATES",
    "Call",
    "OpTime",
    "Send",
    "Tensor",
    "Training",
    "algorithm_sends",
    "call_of",
    "flops",
    "is_product",
    "join_time",
    "local_elements",
    "op_time",
    "update_time",
    "work_parts",
]
