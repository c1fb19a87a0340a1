"""What things cost: FLOPs, time and memory of ops, and what is sent.

Read `call.py` (an op on a rank), `work.py` and `time.py` (FLOPs and seconds), `algorithm_collectives.py` and
`reshard_prices.py` with `reshard_search.py` (communication), `saved_for_backward.py` and `training.py` (what is
stored), then `resources.py` (all of it as a vector).
"""

from ..ops.contexts import AlgorithmCollective, LocalCall, LocalTensor, SavedForBackward
from .algorithm_collectives import algorithm_collectives
from .call import local_call, local_elements, work_parts
from .saved_for_backward import saved_bytes, saved_for_backward
from .strides import Strides, strides_of
from .time import OpTime, join_time, op_time, update_time
from .training import ON_CPU, ON_GPU, STATES, BackendTraits, TrainingSetup, backend_traits
from .work import flops, is_matmul, training_flops

__all__ = [
    "ON_CPU",
    "ON_GPU",
    "STATES",
    "AlgorithmCollective",
    "BackendTraits",
    "LocalCall",
    "LocalTensor",
    "OpTime",
    "SavedForBackward",
    "Strides",
    "TrainingSetup",
    "algorithm_collectives",
    "backend_traits",
    "flops",
    "is_matmul",
    "join_time",
    "local_call",
    "local_elements",
    "op_time",
    "saved_bytes",
    "saved_for_backward",
    "strides_of",
    "training_flops",
    "update_time",
    "work_parts",
]
