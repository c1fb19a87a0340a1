"""Tables, graphs and series: a DLRM, PyTorch's gcn and time_sequence_prediction."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .running import OneLine, check, parameters, seeded

DOUBLE = torch.float64


class DLRM(nn.Module):
    """Bags of categories, a tower for numbers, and the products of all pairs of features."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(10 + at, 8, mode="sum") for at in range(3))
        self.bottom = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(8 + 6, 16), nn.ReLU(), nn.Linear(16, 1))
        self.register_buffer("pairs", torch.tril_indices(4, 4, offset=-1), persistent=False)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        x = self.bottom(dense)
        bags = [table(sparse[:, at]) for at, table in enumerate(self.tables)]
        features = torch.stack([x, *bags], dim=1)
        products = torch.bmm(features, features.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([x, products], dim=1)).squeeze(1)


def dlrm(one_line: OneLine) -> list[Tensor]:
    model = seeded(lambda: DLRM().double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = one_line(model, optimizer)
    generator = torch.Generator().manual_seed(0)
    seen: list[Tensor] = []
    for _ in range(3):
        dense = torch.randn(4, 5, generator=generator, dtype=DOUBLE)
        sparse = torch.randint(10, (4, 3, 2), generator=generator)
        clicked = torch.randint(2, (4,), generator=generator).to(DOUBLE)
        loss = F.binary_cross_entropy_with_logits(model(dense, sparse), clicked)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.detach().clone())
    return seen + parameters(model)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero3=2", "auto"])
def test_dlrm(plan: str) -> None:
    check(dlrm, plan)


class GraphConv(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(width, out))
        self.bias = nn.Parameter(torch.zeros(out))
        nn.init.xavier_normal_(self.kernel)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return torch.mm(adjacency, torch.mm(x, self.kernel)) + self.bias


class GCN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gc1, self.gc2 = GraphConv(6, 8), GraphConv(8, 3)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        x, adjacency = inputs
        return F.log_softmax(self.gc2(F.relu(self.gc1(x, adjacency)), adjacency), dim=1)


def gcn(one_line: OneLine) -> list[Tensor]:
    """One graph is the whole input, the loss is over some of its nodes, decided by a mask outside."""
    model = seeded(lambda: GCN().double())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
    model, optimizer = one_line(model, optimizer)
    generator = torch.Generator().manual_seed(0)
    nodes = torch.randn(8, 6, generator=generator, dtype=DOUBLE)
    edges = (torch.rand(8, 8, generator=generator) < 0.4).to(DOUBLE) + torch.eye(8, dtype=DOUBLE)
    adjacency, labels = edges / edges.sum(1, keepdim=True), torch.randint(3, (8,), generator=generator)
    train = torch.arange(8) < 5
    seen: list[Tensor] = []
    for _ in range(3):
        optimizer.zero_grad()
        output = model((nodes, adjacency))
        loss = F.nll_loss(output[train], labels[train])
        loss.backward()
        optimizer.step()
        seen.append(loss.detach().clone())
    return seen + parameters(model)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero3=2", "auto"])
def test_gcn(plan: str) -> None:
    check(gcn, plan)


class Sequence(nn.Module):
    """Two cells that run over a series and then go on by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm1, self.lstm2, self.linear = nn.LSTMCell(1, 8), nn.LSTMCell(8, 8), nn.Linear(8, 1)

    def forward(self, series: Tensor, future: int = 0) -> Tensor:
        outputs = []
        h, c, h2, c2 = (torch.zeros(series.size(0), 8, dtype=series.dtype) for _ in range(4))
        for value in series.split(1, dim=1):
            h, c = self.lstm1(value, (h, c))
            h2, c2 = self.lstm2(h, (h2, c2))
            output = self.linear(h2)
            outputs.append(output)
        for _ in range(future):
            h, c = self.lstm1(output, (h, c))
            h2, c2 = self.lstm2(h, (h2, c2))
            output = self.linear(h2)
            outputs.append(output)
        return torch.cat(outputs, dim=1)


def time_sequence(one_line: OneLine) -> list[Tensor]:
    """LBFGS, which calls the closure as often as it likes; then a prediction without gradients."""
    model = seeded(lambda: Sequence().double())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
    series = torch.sin(torch.arange(28, dtype=DOUBLE).view(4, 7))
    model, optimizer = one_line(model, optimizer, example=(series[:, :-1],))
    seen: list[Tensor] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(series[:, :-1]), series[:, 1:])
        seen.append(loss.detach().clone())
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        seen.append(model(series[:, :-1], future=3).clone())
    return seen + parameters(model)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero3=2"])
def test_time_sequence_prediction(plan: str) -> None:
    check(time_sequence, plan)
