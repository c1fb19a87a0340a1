"""A small run in float64, and the same run written by hand for one device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.data import ReplicaBatchSampler
from shardwright.train import Callback, Checkpoints, CSVLogger, Logger, Trainer
from tests.options import grouped_for_trainer


class Net(nn.Module):
    """Two layers with dropout; the loss inside, or the output alone."""

    def __init__(self, dropout: float = 0.0, wide: int = 16) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, wide), nn.Linear(wide, 8), nn.Dropout(dropout)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        out = self.down(self.drop(F.gelu(self.up(x))))
        return out if y is None else F.mse_loss(out, y)


def net(dropout: float = 0.0) -> Net:
    torch.manual_seed(3)
    return Net(dropout).double()


def rows(count: int = 22) -> list[tuple[Tensor, Tensor]]:
    drawn = torch.randn(count, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    return [(pair[0], pair[1]) for pair in drawn]


class Kept(Logger):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.metrics_by_step: list[tuple[int, dict[str, float]]] = []
        self.words: list[str] = []

    def log(self, metrics: Any, step: int) -> None:
        self.metrics_by_step.append((step, dict(metrics)))

    def say(self, text: str) -> None:
        self.words.append(text)

    def series(self, name: str) -> dict[int, float]:
        return {step: value[name] for step, value in self.metrics_by_step if name in value}


def trainer(folder: Path | str, **more: Any) -> Trainer:
    """A trainer of a small run, with a logger that keeps everything."""
    usual: dict[str, Any] = {
        "model": net(), "train_data": rows(), "batch_size": 8, "plan": "single", "directory": Path(folder) / "run",
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.01), "log_every": 1, "seed": 4,
        "loggers": [Kept()], "checkpoints": Checkpoints(background=False),
    }  # fmt: skip
    if not {"max_steps", "max_epochs"} & set(more):
        usual["max_epochs"] = 2
    if "micro_batch_size" in more and "accumulate" in more:
        usual.pop("batch_size")
    return Trainer(**grouped_for_trainer(**{**usual, **more}))


def losses(training: Trainer, name: str = "loss") -> dict[int, float]:
    (kept,) = [logger for logger in training.loggers if isinstance(logger, Kept)]
    return kept.series(name)


def by_hand(
    epochs: int, change: Callable[[int, nn.Module], None] = lambda step, model: None, schedule: Any = None
) -> tuple[dict[int, float], dict[str, Tensor]]:
    """Losses and parameters of the same run on one device, each update one call on its whole batch."""
    model, data = net(), rows()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = schedule(optimizer) if schedule is not None else None
    order = ReplicaBatchSampler(len(data), 8, shuffle=True, seed=4)
    by_name: dict[int, float] = {}
    for epoch in range(epochs):
        order.set_epoch(epoch)
        for batch in order:
            loss = model(torch.stack([data[row][0] for row in batch]), torch.stack([data[row][1] for row in batch]))
            loss.backward()
            change(len(by_name), model)
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
            by_name[len(by_name) + 1] = loss.item()
    return by_name, {key: value.detach().clone() for key, value in model.state_dict().items()}


def parameters(training: Trainer) -> dict[str, Tensor]:
    return {key: value.detach().clone() for key, value in training.model.full_state_dict().items()}


def close(actual: dict[Any, Any], wanted: dict[Any, Any], tolerance: float = 1e-10) -> None:
    assert actual.keys() == wanted.keys()
    for key, value in wanted.items():
        a, b = torch.as_tensor(actual[key]), torch.as_tensor(value)
        assert (a - b).abs().max() <= tolerance * (1.0 + b.abs().max()), key


__all__ = ["CSVLogger", "Callback", "Kept", "Net", "by_hand", "close", "losses", "net", "parameters", "rows", "trainer"]
