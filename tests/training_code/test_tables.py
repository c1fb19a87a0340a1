"""Tables, graphs and series: a DLRM, PyTorch's gcn and time_sequence_prediction."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.errors import InputError, LoweringError

from .running import DOUBLE, PLANS, OneLine, check, check_refused, parameters, seeded


class DLRM(nn.Module):
    """Bags of categories by indices and offsets, a tower for numbers, and the products of all pairs of features."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.emb_l = nn.ModuleList(nn.EmbeddingBag(10 + at, 8, mode="sum", sparse=sparse) for at in range(3))
        self.bot_l = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        self.top_l = nn.Sequential(nn.Linear(8 + 6, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())

    def apply_emb(self, lS_o: Tensor, lS_i: list[Tensor]) -> list[Tensor]:
        return [self.emb_l[k](indices, lS_o[k]) for k, indices in enumerate(lS_i)]

    def interact_features(self, x: Tensor, ly: list[Tensor]) -> Tensor:
        batch_size, d = x.shape
        T = torch.cat([x, *ly], dim=1).view((batch_size, -1, d))
        Z = torch.bmm(T, torch.transpose(T, 1, 2))
        _, ni, nj = Z.shape
        li = torch.tensor([i for i in range(ni) for j in range(i)])
        lj = torch.tensor([j for i in range(nj) for j in range(i)])
        return torch.cat([x, Z[:, li, lj]], dim=1)

    def forward(self, dense_x: Tensor, lS_o: Tensor, lS_i: list[Tensor]) -> Tensor:
        x = self.bot_l(dense_x)
        return self.top_l(self.interact_features(x, self.apply_emb(lS_o, lS_i)))


def dlrm(one_line: OneLine, sparse: bool = False) -> list[Tensor]:
    """A rate that warms up and falls, updates by SGD; `sparse` as its default is: gradients of tables are sparse."""
    model = seeded(lambda: DLRM(sparse).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = one_line(model, optimizer, unbatched=["lS_o", "lS_i"])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 2 if step < 2 else 0.5)
    loss_fn, generator, seen = nn.BCELoss(reduction="mean"), torch.Generator().manual_seed(0), []
    for _ in range(3):
        dense = torch.randn(4, 5, generator=generator, dtype=DOUBLE)
        offsets = torch.tensor([[0, 2, 3, 7], [0, 1, 4, 6], [0, 3, 3, 5]])
        indices = [torch.randint(10, (8,), generator=generator) for _ in range(3)]
        clicked = torch.randint(2, (4, 1), generator=generator).to(DOUBLE)
        loss = loss_fn(model(dense, offsets, indices), clicked)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        seen.append(loss.detach().clone())
    return seen + parameters(model)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("sparse", [False, True])
def test_dlrm(plan: str, sparse: bool) -> None:
    if plan == "pp=2":  # offsets go into all indices
        check_refused(dlrm, plan, LoweringError, "the batch can't be cut into microbatches", "microbatches=1")
    check(lambda one_line: dlrm(one_line, sparse), plan, **({"microbatches": 1} if plan == "pp=2" else {}))


class GraphConv(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(width, out))
        self.bias = nn.Parameter(torch.zeros(out))
        nn.init.xavier_normal_(self.kernel)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return torch.spmm(adjacency, torch.mm(x, self.kernel)) + self.bias


class GCN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gc1, self.gc2 = GraphConv(6, 8), GraphConv(8, 3)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        x, adjacency = inputs
        return F.log_softmax(self.gc2(F.relu(self.gc1(x, adjacency)), adjacency), dim=1)


def gcn(one_line: OneLine, sparse: bool = False) -> list[Tensor]:
    """One graph is the whole input, the loss is over some of its nodes; accuracy of the others, a test at the end."""
    model = seeded(lambda: GCN().double())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
    model, optimizer = one_line(model, optimizer)
    generator, criterion = torch.Generator().manual_seed(0), nn.NLLLoss()
    nodes = torch.randn(8, 6, generator=generator, dtype=DOUBLE)
    edges = (torch.rand(8, 8, generator=generator) < 0.4).to(DOUBLE) + torch.eye(8, dtype=DOUBLE)
    adjacency, labels = edges / edges.sum(1, keepdim=True), torch.randint(3, (8,), generator=generator)
    adjacency = adjacency.to_sparse() if sparse else adjacency
    order = torch.randperm(8, generator=generator)
    idx_train, idx_val = order[:5], order[5:]
    seen: list[Tensor] = []
    for _ in range(3):
        model.train()
        optimizer.zero_grad()
        output = model((nodes, adjacency))
        loss = criterion(output[idx_train], labels[idx_train])
        loss.backward()
        optimizer.step()
        seen.append(loss.detach().clone())
        model.eval()
        with torch.no_grad():
            output = model((nodes, adjacency))
            right = output[idx_val].argmax(dim=1).eq(labels[idx_val]).double().mean()
            seen += [right, criterion(output[idx_val], labels[idx_val]).clone()]
    return seen + parameters(model)


@pytest.mark.parametrize("plan", PLANS)
def test_gcn(plan: str) -> None:
    if plan == "pp=2":  # nodes read each other
        check_refused(gcn, plan, LoweringError, "the batch can't be cut into microbatches", "microbatches=1")
    check(gcn, plan, **({"microbatches": 1} if plan == "pp=2" else {}))


def test_a_sparse_graph_is_passed_where_it_stays_whole() -> None:
    train = partial(gcn, sparse=True)
    check(train, "tp=2")
    check_refused(train, "dp=2", InputError, "sparse tensors can't be sharded", "dense")


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


def time_sequence(one_line: OneLine, lazy: bool = False) -> list[Tensor]:
    """LBFGS, which calls the closure as often as it likes, and after each step a prediction without gradients."""
    model = seeded(lambda: Sequence().double())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8, max_iter=4)
    series = torch.sin(torch.arange(28, dtype=DOUBLE).view(4, 7))
    inputs, target = series[:, :-1], series[:, 1:]
    model, optimizer = one_line(model, optimizer, **({} if lazy else {"example": (inputs,)}))
    criterion, seen = nn.MSELoss(), []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = criterion(model(inputs), target)
        seen.append(loss.detach().clone())
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
        with torch.no_grad():
            pred = model(inputs, future=3)
            seen += [criterion(pred[:, :-3], target).clone(), pred.clone()]
    return seen + parameters(model)


@pytest.mark.parametrize("plan", PLANS)
def test_time_sequence_prediction(plan: str) -> None:
    check(time_sequence, plan)


@pytest.mark.parametrize("plan", ["dp=2", "pp=2"])
def test_lbfgs_does_not_run_while_the_model_is_compiled(plan: str) -> None:
    words = "LBFGS", "example"
    check_refused(lambda one_line: time_sequence(one_line, lazy=True), plan, InputError, *words)
