"""What things cost: the arithmetic of an op, its time, its memory, what is sent."""

from .call import Call, Tensor, call_of, local_elements, work_parts
from .keeps import Keeps, keeps, kept_bytes
from .peak import Memory, peak
from .strides import Strides, shares, strides_of
from .training import ON_CPU, ON_GPU, STATES, Habits, Training
from .work import flops, is_product

__all__ = [
    "ON_CPU",
    "ON_GPU",
    "STATES",
    "Call",
    "Habits",
    "Keeps",
    "Memory",
    "Strides",
    "Tensor",
    "Training",
    "call_of",
    "flops",
    "is_product",
    "keeps",
    "kept_bytes",
    "local_elements",
    "peak",
    "shares",
    "strides_of",
    "work_parts",
]
