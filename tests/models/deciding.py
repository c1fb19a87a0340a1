"""Models whose way is decided by data, written so that a graph can say it."""

import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop


class Chooses(nn.Module):
    """A branch in a branch; each has a layer of its own, one makes a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        def large(x: Tensor) -> Tensor:
            return torch.cond(x.max() > 5, lambda x: x.sin() + torch.tensor(3.0), lambda x: self.large(x), (x,))

        return torch.cond(x.sum() > 0, large, lambda x: self.small(x) * self.scale, (x,))


class Recurrent(nn.Module):
    """A recurrent layer as a scan over dim 1."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        def step(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            state = torch.tanh(self.cell(carry) + row)
            return state, state * 2

        last, every = scan(step, torch.zeros_like(x[:, 0]), x, dim=1)
        return last + every.mean(1)


class Repeats(nn.Module):
    """As many turns as the data wants."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        turns = (x[0, 0] > 0).long() + 2

        def body(left: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return left - 1, torch.tanh(self.turn(x))

        return while_loop(lambda left, x: left > 0, body, (turns, x))[1]


class Net(nn.Module):
    """Ordinary layers around a part that decides by data."""

    def __init__(self, part: nn.Module, layers: int = 1, drop: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.parts = nn.ModuleList(part if at == 0 else type(part)() for at in range(layers))
        self.drop = nn.Dropout(drop)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for part in self.parts:
            y = x[:, None, :].expand(-1, 3, -1) if isinstance(part, Recurrent) else x
            x = x + self.drop(part(y))
        return self.head(x).pow(2).mean()
