"""Ranks started by srun, without torchrun: Slurm's variables as those that torch.distributed reads."""

from __future__ import annotations

import re
from collections.abc import Mapping


def joined_by_srun(environment: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE and so on for a task of srun; nothing for any other process, or where torchrun has set them.

    The first node of the job is the master, on a port that follows from the job's number, or as
    MASTER_ADDR and MASTER_PORT say.
    """
    tasks = environment.get("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS", "1"))
    if "WORLD_SIZE" in environment or "SLURM_PROCID" not in environment or int(tasks) < 2:
        return {}
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "localhost")
    job = int(environment.get("SLURM_JOB_ID", "0"))
    variables = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or first_node(nodes),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(20000 + job % 20000),
    }
    here = re.match(r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))  # "8(x4)": eight on each of four
    if here is not None:
        variables["LOCAL_WORLD_SIZE"] = here[0]
    return variables


def first_node(names: str) -> str:
    """The first of a list of nodes as Slurm writes it: gpu[03-07,12],login1 begins with gpu03."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", names)
    if match is None:
        return names
    return match[1] + (match[2] or "") + (match[3] or "")
