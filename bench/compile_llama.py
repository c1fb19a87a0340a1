"""How long it takes to compile Llama-70B on meta: nothing is allocated, nothing is run.

Each measurement has a process of its own, so that its peak memory is its own.

    python -m bench.compile_llama 512
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

TENSOR = 8
SEQ = 4096
REPEATS = 3


@dataclass(frozen=True, kw_only=True)
class Compiled:
    ranks: int
    capture: float  # seconds
    compile: tuple[float, ...]  # seconds without capture (atoms, plan, lower, emit), one per repeat
    lines: int  # of the emitted file
    peak: float  # GiB of this process


def llama_70b() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        use_cache=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def data_groups(ranks: int) -> int:
    """Two at least, so that all sizes have the same two axes and only the number of ranks differs."""
    return max(2, ranks // TENSOR)


def example(ranks: int) -> dict[str, Tensor]:
    """One row for each data-parallel group."""
    idx = torch.zeros(data_groups(ranks), SEQ, dtype=torch.long, device="meta")
    return {"input_ids": idx, "labels": idx.clone()}  # a clone: export reads one tensor given twice as one


def plan_for(ranks: int) -> str:
    data = data_groups(ranks)
    return f"tp={ranks // data},dp={data}"


def capture(model: nn.Module, kwargs: dict[str, Tensor]) -> Any:
    from shardwright.capture import capture as captured

    return captured(model, (), kwargs)


def emit(captured: Any, plan: str, folder: Path) -> Path:
    """Atoms, plan by policy, lower, emit; nothing may be taken from a cache. Returns the emitted file."""
    from shardwright.compile import compile_graph, write
    from shardwright.plan import build_plan, parse_plan_string

    graph = captured.graph
    _, program, text = compile_graph(graph, lambda analysis: build_plan(graph, parse_plan_string(plan), analysis))
    return write(text, folder, program)


def compile_llama(ranks: int) -> Compiled:
    """To be called in a fresh process: peak memory is the process's."""
    import tempfile

    model, kwargs = llama_70b(), example(ranks)
    captured, capture_seconds = timed(lambda: capture(model, kwargs))
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(REPEATS):
            target = Path(folder) / str(repeat)
            file, took = timed(lambda target=target: emit(captured, plan_for(ranks), target))
            seconds.append(took)
        lines = len(file.read_text().splitlines())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return Compiled(ranks=ranks, capture=capture_seconds, compile=tuple(seconds), lines=lines, peak=peak)


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = work()
    return result, time.perf_counter() - start


def in_own_process(ranks: int) -> Compiled:
    command = [sys.executable, "-m", "bench.compile_llama", str(ranks)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"compiling for {ranks} ranks failed: {done.stderr.strip().splitlines()[-1]}")
    fields = json.loads(done.stdout.splitlines()[-1])
    return Compiled(**fields | {"compile": tuple(fields["compile"])})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("ranks", type=int)
    print(json.dumps(asdict(compile_llama(parser.parse_args().ranks))))
