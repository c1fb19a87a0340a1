"""LightningModules as people write them, and a Trainer without decoration."""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset, default_collate
from transformers import AutoModelForCausalLM, BatchEncoding

import lightning
from shardwright.huggingface import empty_model
from shardwright.lightning import ShardwrightStrategy
from tests.options import grouped

SEED = 1
LARGE = 2.0**22  # a scale of the loss that float16 has to come down from


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(LightningModule):
    """The textbook: a step that calls self(x), takes a loss of it and logs it."""

    def __init__(self, width: int = 8, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.log_dict({"val": F.cross_entropy(logits, y), "right": (logits.argmax(-1) == y).double().mean()})

    def test_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("test", F.cross_entropy(self(x), y))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def rows(
    size: int = 8, count: int = 24, shuffled: bool = False, dtype: torch.dtype = torch.float64
) -> DataLoader[Any]:  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 8, generator=generator, dtype=dtype)
    data = TensorDataset(x, torch.randint(4, (count,), generator=generator))
    sampler = DistributedSampler(data, 1, 0, seed=SEED) if shuffled else None
    return DataLoader(data, batch_size=size, sampler=sampler)


def trainer(strategy: Any, devices: int, **options: Any) -> Trainer:
    options = {"max_epochs": 2, "enable_checkpointing": False, "logger": False, **options}
    options.setdefault("default_root_dir", tempfile.mkdtemp(prefix="lightning-"))
    quiet = {"enable_progress_bar": False, "enable_model_summary": "callbacks" in options}
    return Trainer(strategy=strategy, accelerator="cpu", devices=devices, **quiet, **options)


def ours(plan: str, devices: int, **options: Any) -> Trainer:
    own = {key: options.pop(key) for key in ("parts", "inputs", "example", "weights", "microbatches") if key in options}
    folder = options.setdefault("default_root_dir", tempfile.mkdtemp(prefix="lightning-"))
    parts = own.pop("parts", None)
    groups = grouped(directory=f"{folder}/generated", **own)
    return trainer(ShardwrightStrategy(plan, parts=parts, **groups), devices, **options)


@contextmanager
def quiet(size: int = 1) -> Iterator[None]:
    """As torchrun would start this process, and without what Lightning likes to say."""
    before = dict(os.environ)
    if size > 1:
        os.environ.update(LOCAL_WORLD_SIZE=str(size), GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        os.environ.update(TORCHELASTIC_RUN_ID="test")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"lightning\..*")
            warnings.filterwarnings("ignore", message=".*LeafSpec.*")
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def seeded(make: Any, dtype: torch.dtype = torch.float64) -> Any:
    lightning.seed_everything(SEED, verbose=False)
    return make().to(dtype)


def half() -> MixedPrecision:
    """float16 as Lightning has it on a GPU, with a scale that is too large at first."""
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=LARGE))


def single(make: Any, shuffled: bool = False, **options: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters and metrics after training on one device, by Lightning alone."""
    with quiet():
        run, net = trainer("auto", 1, **options), seeded(make)
        run.fit(net, rows(shuffled=shuffled), rows())
    return net.state_dict(), dict(run.callback_metrics)


def compiled(
    make: Any, plan: str, size: int, batch: int = 8, **options: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The same by our strategy, on one of `size` ranks."""
    with quiet(size):
        run, net = ours(plan, size, **options), seeded(make)
        run.fit(net, rows(batch), rows(batch))
        return whole(run), dict(run.callback_metrics)


def whole(run: Trainer) -> dict[str, Tensor]:
    model = run.strategy.compiled.model
    if hasattr(model, "full_state_dict"):
        return {key: tensor.clone() for key, tensor in model.full_state_dict().items()}
    return {
        key: getattr(tensor, "full_tensor", lambda value=tensor: value)().clone()
        for key, tensor in model.state_dict().items()
    }


def apart(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest difference, relative to the largest entry."""
    assert mine.keys() == theirs.keys()
    return max(
        float((mine[key].double() - their.double()).abs().max()) / (1e-300 + float(their.double().abs().max()))
        for key, their in theirs.items()
    )


class Busy(Net):
    """A step that does more than compute: detached logs, a metric, a list that is read at the end of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.MeanMetric()
        self.losses: list[Tensor] = []
        self.kept: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.losses.append(loss.detach())
        self.log("half", loss.detach() / 2, on_step=False, on_epoch=True, sync_dist=True)
        self.accuracy((logits.argmax(-1) == y).double())
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return {"loss": loss}

    def on_train_epoch_end(self) -> None:
        self.kept.append(float(torch.stack(self.losses).mean()))
        self.log("kept", self.kept[-1])
        self.losses.clear()


class Pair(LightningModule):
    """Two networks with an optimizer each, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.maker = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.judge = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        built = F.softplus(-self.judge(self.maker(x))).mean()
        self.manual_backward(built)
        self.clip_gradients(first, 0.1, "norm")
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)
        if batch_idx % 2 == 0:  # a step that is not compiled may look at anything
            reported = F.softplus(-self.judge(x)).mean() + F.softplus(self.judge(self.maker(x).detach())).mean()
            second.zero_grad()
            self.manual_backward(reported)
            second.step()
            self.log("told", reported)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.maker.parameters(), lr=0.1), torch.optim.AdamW(self.judge.parameters(), lr=1e-2)]


class Empty(Net):
    """Layers are made where the Trainer asks for them, without values."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = None, None

    def configure_model(self) -> None:
        if self.head is None:
            with torch.device("meta"):
                self.blocks = nn.Sequential(Block(8), Block(8)).double()
                self.head = nn.Linear(8, 4).double()


class Epochs(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 + self.current_epoch)


class Numbers(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (2 if batch_idx % 2 else 1)


class Remembers(Net):
    _seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self._seen += 1
        return super().training_step(batch, batch_idx)


class Counts(Net):
    def __init__(self) -> None:
        super().__init__()
        self.counts = {"rows": 0}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.counts["rows"] += len(batch[1])
        return super().training_step(batch, batch_idx)


class Judged(Net):
    """The answer of a metric is part of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * (1 + self.mean(loss))


class Tuned(LightningModule):
    """A model of transformers that is made empty, and gets its weights from a folder."""

    def __init__(self, folder: str, empty: bool = False) -> None:
        super().__init__()
        self.folder, self.empty, self.model = folder, empty, None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = empty_model(self.folder) if self.empty else AutoModelForCausalLM.from_pretrained(self.folder)
            self.model.train()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch["input_ids"]).logits.argmax(-1)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def sentences(folder: str) -> DataLoader[Any]:
    """As a tokenizer of transformers gives them: a dict of its own kind, with a mask, and some text beside it."""
    ids = torch.randint(64, (8, 10), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(10) < torch.arange(3, 11)[:, None]
    data = [
        {"input_ids": i, "attention_mask": m.long(), "labels": i.masked_fill(~m, -100)}
        for i, m in zip(ids, mask, strict=True)
    ]
    return DataLoader(data, batch_size=4, collate_fn=lambda value: BatchEncoding(default_collate(value)))


class Many(Net):
    """Several loaders to validate with, a collection of metrics, a list that is read at the end of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, 8, dtype=torch.float64)  # for the summary of the model
        self.means = torchmetrics.MetricCollection({"mean": torchmetrics.MeanMetric(), "max": torchmetrics.MaxMetric()})
        self.message: list[dict[str, Tensor]] = []

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.log("val", loss, sync_dist=True)
        if dataloader_idx == 1:
            self.log_dict(self.means(logits))
        self.message.append({"rows": logits.argmax(-1)})
        return loss

    def on_validation_epoch_end(self) -> None:
        self.log("sum", float(sum(part["rows"].sum() for part in self.message)))
        self.message.clear()


class Stream(IterableDataset[Any]):
    """Rows that come one after the other; the last batch has fewer."""

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(5)
        for _ in range(20):
            yield torch.randn(8, generator=generator, dtype=torch.float64), torch.randint(4, (), generator=generator)


class Data(LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Stream(), batch_size=8)

    def val_dataloader(self) -> list[DataLoader[Any]]:
        return [rows(count=20), rows(count=12)]


class Looks(Callback):
    """Calls the module itself, between steps."""

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        with torch.no_grad():
            module.log("looked", module(torch.ones(3, 8, dtype=torch.float64)).sum())


def many(plan: str, size: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A run with whatever a Trainer has; by Lightning alone without a plan."""
    with quiet(size):
        folder = tempfile.mkdtemp(prefix="lightning-")
        callbacks = [EarlyStopping("val/dataloader_idx_0", patience=3), LearningRateMonitor("step"), Looks()]
        options = {"callbacks": callbacks, "logger": CSVLogger(folder), "log_every_n_steps": 1}
        run = ours(plan, size, **options) if plan else trainer("auto", 1, **options)
        net = seeded(Many)
        run.fit(net, datamodule=Data())
        return whole(run) if plan else net.state_dict(), dict(run.callback_metrics)


class Annealed(Net):
    """Its loss has a weight that grows from epoch to epoch."""

    weight = 1.0

    def on_train_epoch_start(self):
        self.weight = 1.0 + self.current_epoch

    def training_step(self, batch, batch_idx):
        return self.weight * super().training_step(batch, batch_idx)
