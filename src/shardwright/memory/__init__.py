"""The memory simulation: how much memory a rank needs for a training step, read from its lowered program.

`rank_program.py` reads a program as steps that make, save and release tensors; `flow.py` says what an op needs while it
runs, `lifetimes.py` how long generated code holds on to a value. `timeline.py` runs a step on a `heap.py`, with the
buckets and units of `updates.py`. `microbatch.py` does the same for the stages of a pipeline.
"""

from .heap import MemorySample
from .microbatch import RankMemorySample, StageMemory, rank_memory, rank_memory_over_step, simulate_stage_memory
from .timeline import MemoryOverStep, MemoryPeak, memory_over_step, simulate_memory

__all__ = [
           "MemoryOverStep",
           "MemoryPeak",
           "MemorySample",
           "RankMemorySample",
           "StageMemory",
           "memory_over_step",
           "rank_memory",
           "rank_memory_over_step",
           "simulate_memory",
           "simulate_stage_memory",
]  # fmt: skip
