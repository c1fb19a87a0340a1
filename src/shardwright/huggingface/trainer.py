"""`transformers.Trainer` on many ranks: the loop, callbacks, logs and schedules are its own, the model is compiled.

Every rank runs the Trainer as if it were alone. It loads the whole batch, calls the model with it, and gets the
loss of the whole batch, since that is what a compiled model computes (`inputs="global"`). So the arguments mean what
they mean on one device, and nothing of the Trainer has to know about ranks, except for these:

    accelerate     takes this process for the only one (`be_alone`): it neither wraps nor shards nor gathers
    model          is compiled before the first step, with its optimizer (`_compile`)
    checkpoints    are ours: sharded, loadable on another number of ranks and under another plan
    files          are written by rank 0, which is the only one that `is_world_process_zero`
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers
from accelerate.state import DistributedType, PartialState
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, seed_worker

from ..checkpoint import load, load_weights, save, save_weights
from ..errors import CheckpointError, InputError
from ..parallelize import parallelize
from ..plan.request import PlanLike
from ..runtime.model.parallel_model import ParallelModel
from ..runtime.world import start
from .models import fill, save_adapters, without_values
from .refused import check_arguments

STATE = "shardwright"
"""The folder of a checkpoint in which ours is."""
COMPLETE = "trainer_state.json"
"""What is written last."""


class HuggingFaceTrainer(transformers.Trainer):
    """`transformers.Trainer` whose model is compiled for all ranks: `Trainer(model, args, ..., plan="zero3=2")`.

    plan      as `sw.parallelize` takes it
    weights   a folder or file of weights that fills a model without values (`empty_model`)
    example   a batch as the collator makes it; without it, one is made of the first samples of the dataset
    options   further arguments of `sw.parallelize`: {"cluster": ..., "memory": ..., "pipeline": ...}

    The arguments of transformers mean what they mean on one device: per_device_train_batch_size is the batch that all
    ranks share, so that a run does not depend on the number of ranks or on the plan.
    """

    model: Any  # the original, and from the first step or evaluation on the compiled one

    def __init__(
        self, model: Any = None, args: TrainingArguments | None = None, *rest: Any, plan: PlanLike = "auto",
        weights: str | Path | None = None, example: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None, **others: Any,
    ) -> None:  # fmt: skip
        start()
        args = TrainingArguments(output_dir="tmp_trainer") if args is None else args
        self._plan, self._weights, self._batch, self._options = plan, weights, example, dict(options or {})
        self._ordinary: Any = None
        check_arguments(args, self._options)
        if isinstance(model, ParallelModel):
            raise InputError("the Trainer compiles the model by itself; pass the original, and plan= to the Trainer")
        be_alone(args)
        super().__init__(model, args, *rest, **others)
        if self.accelerator.distributed_type != DistributedType.NO or self.is_fsdp_enabled:
            raise InputError(
                f"accelerate is set up for {self.accelerator.distributed_type} by variables (ACCELERATE_USE_...), as "
                "`accelerate launch` sets them from its config; start the script with torchrun"
            )

    # -- the model -------------------------------------------------------------------------

    def _compile(self, loader: DataLoader[Any], training: bool) -> None:
        """Compile the model for the call that a step makes, and have the optimizer train its shards."""
        if isinstance(self.model, ParallelModel):
            return
        self.create_optimizer()
        self._ordinary = without_values(self.model)
        if self.label_smoother is not None:  # the Trainer asks the class of the model later, when it is ours
            shifted = partial(self.label_smoother, shift_labels=_is_causal(self.model))
            self.label_smoother = shifted  # type: ignore[assignment]  # which is only called
        self.model.train(training)
        model, _ = parallelize(
            self.model, self.optimizer, example=self._example(loader, training), plan=self._plan,
            precision="bf16-mixed" if self.args.bf16 else None, accumulate=self.args.gradient_accumulation_steps,
            **self._options,
        )  # fmt: skip
        model.sync_by_hand()
        self.model = self.model_wrapped = model
        if self._weights is not None:
            load_weights(self._weights, model)

    def _example(self, loader: DataLoader[Any], training: bool) -> Any:
        """What a step calls the model with. Nothing is drawn for it: samples, and random numbers, come as ever."""
        with _same_random_numbers():
            batch: Any = self._batch or loader.collate_fn(_first(loader.dataset, self._train_batch_size))
            recorder = _CallRecorder(self.model)
            try:
                if training:
                    batch = self._prepare_inputs(batch)
                    count = self._get_num_items_in_batch([batch], self.args.device)
                    self.compute_loss(recorder, batch, num_items_in_batch=count)
                else:
                    self.prediction_step(recorder, batch, prediction_loss_only=False)
            except _Called as call:
                return call.args, call.kwargs
        raise InputError("compute_loss does not call the model that it is passed, so that there is nothing to compile")

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        if not any(parameter.is_meta for parameter in model.parameters()):  # a model without values has its ranks'
            super()._move_model_to_device(model, device)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self._compile(train_dataloader, training=True)
        self.create_scheduler(num_training_steps=max_steps)
        if resume_from_checkpoint is not None:
            folder = Path(resume_from_checkpoint) / STATE
            load(folder, self.model, self.optimizer, schedulers=self.lr_scheduler, rng=False)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return self.model, train_dataloader

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        with nullcontext() if self.accelerator.sync_gradients else self.model.no_sync():
            loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        return loss

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        trains = self.train_dataset is not None
        self._compile(self.get_train_dataloader() if trains else dataloader, training=trains)
        if not self.accelerator._models:  # what it has not prepared, it would wrap now
            self.accelerator._models.append(self.model)
        return super().evaluation_loop(dataloader, *args, **kwargs)

    def get_train_dataloader(self) -> DataLoader[Any]:
        loader: DataLoader[Any] = super().get_train_dataloader()
        inner = getattr(loader, "base_dataloader", loader)
        if getattr(inner.worker_init_fn, "func", None) is seed_worker:  # with a seed of this rank's own
            inner.worker_init_fn = partial(seed_worker, num_workers=inner.num_workers, rank=0)
        return loader

    def floating_point_ops(self, inputs: Any) -> int:
        """Of all parameters, also those of other stages."""
        model, self.model = self.model, self.model if self._ordinary is None else self._ordinary
        try:
            return int(super().floating_point_ops(inputs))
        finally:
            self.model = model

    def full_model(self) -> Any:
        """The original model with all of its weights, on every rank: to generate, to merge adapters, to look at.

        All ranks call it. It takes the memory of the full model.
        """
        if not isinstance(self.model, ParallelModel):
            return self.model
        model = without_values(self._ordinary)
        with torch.no_grad():
            fill(model, self.model.full_state_dict())
        return model.eval()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """`generate` of the original model with the weights of now. All ranks call it, with the same arguments."""
        with torch.no_grad():
            return self.full_model().generate(*args, **kwargs)

    # -- checkpoints -----------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        if resume_from_checkpoint is True:
            resume_from_checkpoint = str(_last_complete(Path(str(self.args.output_dir))))
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Weights are loaded with the rest, once the model is compiled (`_prepare_for_training`)."""
        _check_complete(Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        best = Path(str(self.state.best_model_checkpoint))
        if (best / STATE).is_dir():
            load(best / STATE, self.model, rng=False)
        elif hasattr(self._ordinary, "peft_config"):
            raise CheckpointError(
                f"{best} has adapters alone, by save_only_model=True, and load_best_model_at_end loads whole training "
                "states; leave one of the two out, or load the adapters with PeftModel.from_pretrained"
            )
        else:
            load_weights(best, self.model)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a folder for `from_pretrained`, from any plan. All ranks call it. Adapters are written alone."""
        folder = Path(output_dir or str(self.args.output_dir))
        if _internal_call and output_dir is not None and not self.args.save_only_model:
            folder.mkdir(parents=True, exist_ok=True)  # of a checkpoint, whose weights are saved with the rest
            return
        if not isinstance(self.model, ParallelModel):
            super().save_model(output_dir, _internal_call)
            return
        if hasattr(self._ordinary, "peft_config"):
            save_adapters(folder, self._ordinary, self.model)
        else:
            save_weights(folder, self.model)
        processor = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if self.args.should_save and processor is not None:
            processor.save_pretrained(str(folder))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder = Path(output_dir) / STATE
        save(folder, self.model, self.optimizer, schedulers=self.lr_scheduler, step=self.state.global_step)

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:  # ranks draw the same numbers
            super()._save_rng_state(output_dir)

    def _save_scaler(self, output_dir: str) -> None:
        """There is none."""

    def _load_scaler(self, checkpoint: str | None) -> None:
        """There is none."""

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        raise InputError("hyperparameter_search would choose trials on every rank by itself; start a run for each")


def be_alone(args: TrainingArguments) -> None:
    """Have accelerate take this process for the only one, with its rank as its index.

    Otherwise it would wrap the model in DDP, give each rank a part of the batches, and gather what is equal already.
    """
    args.device  # noqa: B018  a property that makes accelerate's state
    state = PartialState()
    state.distributed_type, state.num_processes = DistributedType.NO, 1
    args._n_gpu = min(1, args._n_gpu)
    config: Any = args.accelerator_config
    config.dispatch_batches = False  # else rank 0 alone would load what an iterable dataset yields


def _is_causal(model: Any) -> bool:
    inner = model.get_base_model() if hasattr(model, "peft_config") else model
    return type(inner).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def _first(dataset: Any, count: int) -> list[Any]:
    """The first samples of a dataset."""
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return [dataset[index] for index in range(min(count, len(dataset)))]
    samples = iter(dataset)
    if samples is dataset:
        raise InputError(
            f"{type(dataset).__name__} can be read only once, so that compiling the model for its first batch would "
            "take that away; have __iter__ return a new iterator, or pass example= to the Trainer: a collated batch"
        )
    return list(islice(samples, count))


class _Called(Exception):
    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__("the model was called")
        self.args, self.kwargs = args, kwargs


class _CallRecorder(nn.Module):
    """Stands for a model, to see what it is called with."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.__dict__["_model"] = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_model"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _Called(args, kwargs)


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Leave all generators as they were."""
    states = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(devices=[]):  # samples are made on the CPU
        yield
    random.setstate(states[0])
    numpy.random.set_state(states[1])


def _check_complete(checkpoint: Path) -> None:
    if not (checkpoint / STATE).is_dir():
        raise CheckpointError(
            f"{checkpoint} is not a checkpoint of shardwright.huggingface.Trainer: there is no folder {STATE} in it. A "
            "checkpoint of transformers.Trainer has weights for from_pretrained; its optimizer state can't be loaded"
        )
    if not (checkpoint / COMPLETE).is_file():
        raise CheckpointError(
            f"{checkpoint} was not written to its end: there is no {COMPLETE} in it; resume_from_checkpoint=True takes "
            "the newest that was"
        )


def _last_complete(folder: Path) -> Path:
    """The newest checkpoint that was written to its end: a run may be killed while it saves."""
    complete = [path.parent for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*/{COMPLETE}")]
    if not complete:
        raise CheckpointError(f"there is no complete checkpoint in {folder}; start without resume_from_checkpoint")
    return max(complete, key=lambda path: int(path.name.rpartition("-")[2]))
