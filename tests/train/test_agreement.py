"""What goes wrong on the first rank alone, before the first step, is an error on all ranks."""

import sys

from shardwright.train import WandbLogger

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
    for said in pools[2].run(without_wandb, tmp_path):
        assert "WandbLogger needs the package wandb" in said
