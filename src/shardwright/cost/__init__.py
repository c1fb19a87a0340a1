"""What things cost: the arithmetic of an op, its time, its memory, what is sent."""

from .call import Call, Tensor, call_of, local_elements, work_parts
from .keeps import Keeps, keeps, kept_bytes
from .peak import Memory, peak
from .sends import Send, algorithm_sends
from .strides import Strides, shares, strides_of
from .time import OpTime, join_time, op_time, update_time
from .training import ON_CPU, ON_GPU, STATES, Habits, Training, habits_of
from .work import flops, is_product, training_flops

__all__ = [
    "ON_CPU",
    "ON_GPU",
    "STATES",
    "Call",
    "Habits",
    "Keeps",
    "Memory",
    "OpTime",
    "Send",
    "Strides",
    "Tensor",
    "Training",
    "algorithm_sends",
    "call_of",
    "flops",
    "habits_of",
    "is_product",
    "join_time",
    "keeps",
    "kept_bytes",
    "local_elements",
    "op_time",
    "peak",
    "shares",
    "strides_of",
    "training_flops",
    "update_time",
    "work_parts",
]
