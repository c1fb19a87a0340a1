"""What srun says of a task, as torch.distributed reads it."""

import pytest

from shardwright.runtime.slurm import first_node, joined_by_srun

TASK = {
    "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_JOB_ID": "123456", "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}  # fmt: skip


def test_a_task_of_srun_is_a_rank():
    assert joined_by_srun(TASK) == {
        "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "gpu03",
        "MASTER_PORT": "23456",
    }  # fmt: skip
    assert joined_by_srun({**TASK, "MASTER_ADDR": "a", "MASTER_PORT": "1"})["MASTER_ADDR"] == "a"


@pytest.mark.parametrize("other", [{}, {**TASK, "WORLD_SIZE": "16"}, {**TASK, "SLURM_STEP_NUM_TASKS": "1"}])
def test_others_are_left_alone(other):
    assert joined_by_srun(other) == {}


@pytest.mark.parametrize(
    ("names", "first"),
    [
        ("gpu[03-07,12],login1", "gpu03"), ("a,b", "a"), ("node7", "node7"), ("n[1,4]", "n1"), ("r[2-3]-ib", "r2-ib"),
        ("localhost", "localhost"),
    ],
)  # fmt: skip
def test_the_first_node_is_read(names, first):
    assert first_node(names) == first
