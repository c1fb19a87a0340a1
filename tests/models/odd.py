"""Submodules that no graph can say: they branch on data, take numbers out of tensors, go through numpy."""

import torch
from torch import Tensor, nn

import shardwright as sw


class Branching(nn.Module):
    """A branch on data, and statistics of its batch."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("large", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor | None]:
        y = self.linear(x)
        if y.abs().max() > 1.0:
            self.large += 1
            y = y * 0.5
        return {"y": self.norm(y) * scale, "none": None}


class Rows(nn.Module):
    """Goes through numpy; every row for itself."""

    def __init__(self, width: int = 4, drop: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(drop)
        self.register_buffer("signs", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        if (x.detach().numpy() > 1e9).any():
            return x
        return self.drop(self.down(self.up(x).relu())) * self.signs


class Memory(nn.Module):
    """A recurrent layer, which torch keeps in lists of its own."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x[:, None])[0][:, 0] * float(x.sum().item() != 0.123)


class Net(nn.Module):
    """Ordinary layers around submodules that stay as they are, one of them tied and called twice."""

    def __init__(self, odd: nn.Module, block: nn.Module, batch: bool = False, drop: float = 0.2) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.block = sw.opaque(block, batch=batch)
        self.odd = sw.opaque(odd)
        self.drop = nn.Dropout(drop)
        self.head = nn.Linear(4, 4)
        self.head.weight = self.odd.linear.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + self.drop(self.block(x))
        x = self.odd(x, scale=2.0)["y"]
        x = x + self.odd(x)["y"]
        return ((self.head(x) - y) ** 2).mean()


def data() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 4), torch.randn(8, 4)
