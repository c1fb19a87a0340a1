"""What the config files of tests name."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset


class Net(nn.Module):
    def __init__(self, wide: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, wide), nn.Linear(wide, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.down(F.relu(self.up(x))), y)


class Pairs(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, size: int) -> None:
        self.rows = torch.randn(size, 2, 4, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.rows[row, 0], self.rows[row, 1]
