"""What ranks do in the tests of the strategy: runs in a pool of gloo processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning

from . import modules
from .modules import Net, Tuned, compiled, half, many, ours, quiet, rows, seeded, sentences, trainer, whole


def fit(rank: int, name: str, plan: str, size: int, options: dict[str, Any]) -> Any:
    return compiled(getattr(modules, name), plan, size, **options)


def save(rank: int, plan: str, folder: str) -> list[str]:
    """Two epochs with a checkpoint after each, of which the better one is kept, and the last."""
    with quiet(2):
        kept = ModelCheckpoint(folder, monitor="val", save_last=True, filename="{epoch}")
        run = ours(plan, 2, callbacks=[kept], enable_checkpointing=True)
        run.fit(seeded(Net), rows(), rows())
        run.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
        return sorted(path.name for path in Path(folder).iterdir())


def resume(rank: int, name: str, plan: str, path: str) -> Any:
    """Two more epochs, under another plan; then what test and validate say of the result."""
    with quiet(2):
        run, net = ours(plan, 2, max_epochs=4), getattr(modules, name)()
        run.fit(net.double(), rows(), rows(), ckpt_path=path)
        after = whole(run)
        tested = run.test(net, rows(), verbose=False)[0]["test"]
        run.validate(net, rows(), ckpt_path=path, verbose=False)
        return after, tested, float(run.callback_metrics["val"]), run.lr_scheduler_configs == []


def narrow(rank: int, plan: str, size: int, options: dict[str, Any]) -> Any:
    """A run in float32, bfloat16 or float16: the parameters, and the scale of the loss if there is one."""
    with quiet(size):
        make = getattr(modules, options.get("name", "Net"))
        options = {key: value for key, value in options.items() if key != "name"}
        options |= {"plugins": [half()]} if options["precision"] is None else {}
        run = ours(plan, size, **options) if plan else trainer("auto", 1, **options)
        run.fit(seeded(make, torch.float32), rows(dtype=torch.float32))
        scaler = getattr(run.precision_plugin, "scaler", None)
        return whole(run) if plan else run.model.state_dict(), scaler and scaler.get_scale()


def tune(rank: int, plan: str, folder: str, size: int) -> Any:
    """A model of transformers in a LightningModule: losses, and what it predicts; then how it does in a second fit."""
    with quiet(size):
        lightning.seed_everything(1, verbose=False)
        data = sentences(folder)
        run = ours(plan, size, weights={"model": folder}, max_epochs=1) if plan else trainer("auto", 1, max_epochs=1)
        net = Tuned(folder, empty=bool(plan))
        run.fit(net, data)
        first = float(run.callback_metrics["loss"])
        message = run.predict(net, data)
        again = ours(plan, size, max_epochs=1) if plan else trainer("auto", 1, max_epochs=1)
        again.fit(net, data)
        return first, torch.cat(message), float(again.callback_metrics["loss"])


def stop(rank: int, name: str, plan: str, path: str) -> None:
    with quiet(2):
        run = ours(plan, 2)
        run.fit(seeded(getattr(modules, name)), rows(), rows())
        run.save_checkpoint(path)


def go_on(rank: int, name: str, plan: str, path: str) -> Any:
    with quiet(2):
        run = ours(plan, 2, max_epochs=4)
        run.fit(getattr(modules, name)().double(), rows(), rows(), ckpt_path=path)
        return whole(run)


def all_sorts(rank: int, plan: str) -> Any:
    return many(plan, 2)
