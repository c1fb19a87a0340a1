"""What a Trainer is made with: datasets of any kind, and arguments that are refused."""

import warnings

import pytest
import torch
import transformers
from torch.utils.data import IterableDataset
from transformers import default_data_collator

from shardwright.errors import InputError
from shardwright.huggingface import Trainer
from tests.huggingface.little import MARKS, arguments, logs_of, make, model, same_logs, samples
from tests.parity.conftest import pools

__all__ = ["pools"]

pytestmark = MARKS


# -- data --------------------------------------------------------------------------------------


def first_of_worker(rank, kind, folder):
    """What a worker of the loader draws."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own = {"plan": "single"} if kind is Trainer else {}
        trainer = make(kind, folder, model(), dataloader_num_workers=2, **own)
        loader = trainer.get_train_dataloader().base_dataloader
    torch.manual_seed(7)
    loader.worker_init_fn(0)
    return float(torch.rand(1))


def test_workers_draw_the_same_numbers_on_every_rank(pools, tmp_path):
    expected = first_of_worker(0, transformers.Trainer, tmp_path)
    assert pools[2].run(first_of_worker, Trainer, str(tmp_path), timeout=800) == [expected, expected]


class Stream(IterableDataset):
    """Samples that can be read again, or only once."""

    def __init__(self, once):
        self.rows = iter(samples(8)) if once else samples(8)

    def __iter__(self):
        return self if isinstance(self.rows, type(iter([]))) else iter(self.rows)

    def __next__(self):
        return next(self.rows)


def stream(rank, kind, folder, once, example=None):
    own = {} if kind is transformers.Trainer else {"plan": "dp=2" if rank >= 0 else "single", "example": example}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = kind(model(), arguments(folder, max_steps=2), train_dataset=Stream(once), **own)
        trainer.train()
    return logs_of(trainer)


def test_an_iterable_dataset_is_read_by_every_rank_from_its_beginning(pools, tmp_path):
    expected = stream(-1, transformers.Trainer, tmp_path, once=False)
    for logs in pools[2].run(stream, Trainer, str(tmp_path), False, timeout=800):
        same_logs(logs, expected)


def test_one_that_can_be_read_once_needs_an_example(tmp_path):
    with pytest.raises(InputError, match=r"can be read only once.*pass example= to the Trainer"):
        stream(-1, Trainer, tmp_path, once=True)
    batch = default_data_collator(samples(2))
    same_logs(stream(-1, Trainer, tmp_path, True, example=batch), stream(-1, transformers.Trainer, tmp_path, once=True))


# -- refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"activation_checkpointing": True}, "activation_checkpointing=True: add recompute to the plan"),
        ({"torch_compile": True}, "torch_compile=True: the model is compiled already"),
        ({"neftune_noise_alpha": 0.1}, "neftune_noise_alpha"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"bf16_full_eval": True}, "use bf16=True"),
        ({"optim": "galore_adamw"}, r"optim=.*use one of torch\.optim"),
        ({"save_on_each_node": True}, "save_on_each_node=True: ranks write one checkpoint together"),
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches=True: every rank loads the batch"),
        ({"options": {"inputs": "per_replica", "accumulate": 2}}, r"options\['inputs'\](.|\n)*options\['accumulate'\]"),
        ({"push_to_hub": True}, 'use hub_strategy="end"'),
    ],
)
def test_arguments_that_cannot_be_followed_are_refused_by_name(tmp_path, settings, message):
    with pytest.raises(InputError, match=message):
        make(Trainer, tmp_path, model(), plan="single", **settings)


@pytest.mark.parametrize(("name", "remedy"), [("deepspeed", "zero3=N"), ("fsdp", "zero3=N")])
def test_other_backends_are_refused_by_name(tmp_path, name, remedy):
    args = arguments(tmp_path)
    setattr(args, name, {"zero_optimization": {"stage": 3}})  # what their packages would have been needed for
    with pytest.raises(InputError, match=f"{name}=.*{remedy}"):
        Trainer(model(), args, train_dataset=samples(), plan="single")
