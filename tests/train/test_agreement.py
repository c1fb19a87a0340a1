"""What goes wrong on the first rank alone, before the first step, is an error on all ranks."""

import sys

import torch.distributed as dist

from shardwright.runtime.world import timeout_of
from shardwright.train import WandbLogger
from shardwright.train.agreement import Agreement

from .runs import trainer


def without_wandb(rank, folder):
    sys.modules["wandb"] = None
    try:
        trainer(folder, plan="dp=2", max_steps=2, loggers=[WandbLogger()]).fit()
    except Exception as error:
        return str(error)
    finally:
        del sys.modules["wandb"]
    return "trained"


def test_a_logger_that_cannot_start_ends_the_run_on_all_ranks(tmp_path, pools):
    for message in pools[2].run(without_wandb, tmp_path):
        assert "WandbLogger needs the package wandb" in message


def patience(rank):
    return timeout_of(Agreement()._group), timeout_of(dist.group.WORLD)


def test_ranks_wait_for_each_other_as_long_as_in_a_step(pools):
    for own, run in pools[2].run(patience):
        assert own == run is not None
