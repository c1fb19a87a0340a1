"""What a new user tries in the first hour, on ranks that are threads: it is right, or says what to do instead."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwright.errors import CaptureError, InputError
from shardwright.parallelize import parallelize
from tests.runtime.ranks import run_ranks

from .critics import LABELS, Classifier, Critic, X, agree
from .looped import gradients, parameters
from .test_gradient_paths import compiled, on_ranks_only


def train(*batches):
    def loop(model, optimizer):
        for batch in batches:
            optimizer.zero_grad()
            model(*batch).backward()
            optimizer.step()
        return parameters(model)

    return loop


# -- ops whose arguments matter ------------------------------------------------------------------


class Padded(nn.Module):
    """Padding in every way that the layers of PyTorch have."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.conv = nn.Conv1d(6, 4, 3, padding=1, padding_mode="circular")
        self.pads = nn.Sequential(nn.ReflectionPad1d(2), nn.ReplicationPad1d((1, 2)), nn.ZeroPad1d(1))
        self.last = nn.ConstantPad1d(1, 0.5)

    def forward(self, x):
        x = self.up(x)
        return self.conv(self.last(self.pads(x))).square().mean() + F.pad(x, (1, 1), value=0.0).tanh().mean()


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "pp=2"])
def test_padding_of_every_kind(plan):
    rows = torch.stack([X[:, :6].T.flatten().repeat(2)[:48].view(6, 8) + at for at in range(4)])
    agree(Padded, plan, train((rows,), (rows * 0.5,)))


class Frequent(nn.Module):
    """Gradients of a table are divided by how often an index occurs in the whole batch."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, 8, scale_grad_by_freq=True)
        self.head = nn.Linear(8, 4)

    def forward(self, ids):
        return self.head(self.table(ids)).tanh().square().mean()


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero3=2", "pp=2", "dp=2,tp=2"])
def test_gradients_by_frequency_count_the_whole_batch(plan):
    ids = torch.tensor([[0, 1, 1, 2], [3, 3, 1, 0], [5, 5, 5, 5], [2, 1, 0, 4]])
    agree(Frequent, plan, train((ids,), (ids.flip(0),)))


class Rowless(nn.Module):
    """Convolutions of one sample, without a batch dim: the bias goes along the channels all the same."""

    def __init__(self):
        super().__init__()
        self.up, self.conv, self.back = nn.Linear(8, 8), nn.Conv1d(4, 6, 3), nn.ConvTranspose1d(6, 3, 2)

    def forward(self, x):
        return self.back(self.conv(self.up(x)).tanh()).square().mean()


@pytest.mark.parametrize("plan", ["tp=2", "zero3=2"])
def test_a_convolution_without_a_batch_dim_adds_its_bias_to_channels(plan):
    agree(Rowless, plan, train((X,), (X * 0.5,)))


class Numbers(nn.Module):
    """Norms of everything, means of numbers, grids, bits and factorizations."""

    def __init__(self):
        super().__init__()
        self.up, self.mid = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x, y = torch.tanh(self.up(x)), torch.sin(self.mid(x))
        bits = (torch.ones_like(x).view(torch.int64) % 7).double().mean()
        rows, columns = torch.meshgrid(x[:, 0], y[0], indexing="ij")
        square = self.mid.weight @ self.mid.weight.T + torch.eye(8, dtype=x.dtype)
        factors, pivots = torch.linalg.lu_factor(square)
        solved = torch.linalg.lu_solve(factors, pivots, y.T).square().mean()
        windows = x.as_strided((4, 7, 2), (8, 1, 1)).square().mean()
        return (
            x.norm() + torch.linalg.vector_norm(y, 3) + x.mean().mean() + y.sum().norm() + bits * x.mean()
            + (rows * columns).mean() + solved + windows
        )  # fmt: skip


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero3=2", "dp=2,tp=2"])
def test_numbers_of_whole_tensors(plan):
    agree(Numbers, plan, train((X,), (X * 0.5,)))


def test_a_random_pooling_is_the_same_on_all_ranks_and_takes_what_is_there():
    class Pools(nn.Module):
        def forward(self, x):
            return F.fractional_max_pool3d(x, 2, output_ratio=0.6)

    volume = torch.randn(4, 2, 5, 5, 5, generator=torch.Generator().manual_seed(0))
    for plan in ("dp=2", "tp=2"):
        first, second = run_ranks(2, lambda rank, plan=plan: parallelize(Pools(), plan=plan)(volume))
        assert first.shape == (4, 2, 3, 3, 3) and torch.equal(first, second)
        assert torch.isin(first, volume).all()


@pytest.mark.parametrize("plan", ["auto", "dp=2", "zero3=2"])
def test_a_model_without_ops_returns_what_it_is_given(plan):
    for result in run_ranks(2, lambda rank: parallelize(nn.Identity(), plan=plan)(X)):
        assert torch.equal(result, X)


# -- containers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero3=2"])
def test_a_sequential_model_is_looked_into_as_one(plan):
    def make():
        return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4))

    def loop(model, optimizer):
        seen = []
        for _ in range(2):  # before it is compiled and after
            assert bool(model) and len(model) == 3 and [type(layer).__name__ for layer in model][1] == "Tanh"
            assert model[-1].out_features == 4 and model[0] in model
            optimizer.zero_grad()
            model(X).square().mean().backward()
            seen.append(model[0].weight.grad.norm() + model[2].weight.detach().norm())
            optimizer.step()
        return [torch.as_tensor(value).clone() for value in seen] + parameters(model)

    agree(make, plan, loop)


def test_a_layer_of_a_sequential_model_can_t_be_replaced_once_it_is_compiled():
    def loop(model, optimizer):
        model(X)
        model[0] = nn.Linear(8, 4)

    with pytest.raises(InputError, match=r"the submodule 0 can't be replaced"):
        on_ranks_only(lambda: nn.Sequential(nn.Linear(8, 4)), "tp=2", loop)


# -- sparse tensors ------------------------------------------------------------------------------


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 4)

    def forward(self, x, edges):
        return torch.sparse.mm(edges, self.up(x)).tanh().square().mean()


EDGES = torch.tensor([[0.0, 1, 0, 2], [1, 0, 0, 0], [0, 0, 3, 0], [2, 0, 0, 1]], dtype=torch.float64)


@pytest.mark.filterwarnings("ignore:Sparse")  # torch's own, of what is in beta
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=["coo", "csr"])
def test_a_sparse_input_is_passed_where_it_stays_whole(layout):
    edges = EDGES.to_sparse(layout=layout)
    agree(Graph, "tp=2", train((X, edges), (X * 0.5, edges)))


def test_a_sparse_input_that_would_be_cut_is_refused():
    with pytest.raises(InputError, match="sparse tensors can't be sharded; pass it dense"):
        on_ranks_only(Graph, "dp=2", train((X, EDGES.to_sparse())))


def test_a_sparse_tensor_that_the_model_keeps_is_refused():
    class Keeps(Graph):
        def __init__(self):
            super().__init__()
            self.edges = EDGES.to_sparse()

        def forward(self, x):
            return super().forward(x, self.edges)

    with pytest.raises(CaptureError, match=r"(?s)reads a sparse tensor \[4, 4\].*pass it to forward"):
        on_ranks_only(Keeps, "tp=2", train((X,)))


# -- transforms ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda model: torch.vmap(lambda row: model(row.unsqueeze(0)))(X),
        lambda model: torch.func.grad(lambda x: model(x).sum())(X),
        lambda model: torch.func.jacrev(model)(X),
    ],
    ids=["vmap", "grad", "jacrev"],
)
@pytest.mark.parametrize("early", [True, False], ids=["at first", "later"])
def test_torch_func_around_a_compiled_model_is_refused(call, early):
    def loop(model, optimizer):
        if not early:
            model(X)
        return call(model)

    with pytest.raises(InputError, match=r"called by torch\.func .*use torch\.autograd\.grad"):
        on_ranks_only(Critic, "dp=2", loop)


# -- parts of a pipeline that other ranks hold ---------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        lambda p: p.sum(), lambda p: 2 * p, lambda p: p[0], lambda p: p.grad, lambda p: torch.norm(p),
        lambda p: torch.stack([p]), lambda p: setattr(p, "data", X),
    ],
)  # fmt: skip
def test_a_parameter_of_another_stage_says_where_it_is(use):
    def loop(model, optimizer):
        compiled(model)
        assert "Linear" in repr(model)
        return use(model.up.weight), use(model.down.weight)

    with pytest.raises(InputError, match=r"(up|down)\.weight is a part of another stage.*model\.full_state_dict\(\)"):
        on_ranks_only(Classifier, "pp=2", loop)


def test_parameters_are_frozen_by_name_in_a_pipeline():
    def loop(model, optimizer):
        compiled(model).up.weight.requires_grad = False
        model.down.bias.requires_grad_(False)
        model(X, LABELS).backward()
        return gradients(model)

    agree(Classifier, "pp=2", loop)


def test_the_state_dict_of_a_submodule_that_is_elsewhere_is_refused():
    def loop(model, optimizer):
        compiled(model)
        return model.up.state_dict(), model.down.state_dict()

    with pytest.raises(InputError, match=r"weight.*would lack it here; take it out of model\.full_state_dict\(\)"):
        on_ranks_only(Classifier, "pp=2", loop)


VALUES = {"weight": torch.ones(12, 8, dtype=torch.float64), "bias": torch.ones(12, dtype=torch.float64)}


@pytest.mark.parametrize("plan", ["tp=2", "zero3=2", "pp=2"])
def test_whole_tensors_are_loaded_with_the_whole_model_and_not_into_a_shard(plan):
    def loop(model, optimizer):
        compiled(model).load_state_dict({f"up.{key}": value for key, value in VALUES.items()}, strict=False)
        return parameters(model)

    def into_a_part(model, optimizer):
        compiled(model).up.load_state_dict(VALUES)
        return []

    agree(Classifier, plan, loop)
    with pytest.raises(InputError, match=r"load it with the whole model: model\.load_state_dict"):
        on_ranks_only(Classifier, plan, into_a_part)


@pytest.mark.parametrize("plan", ["dp=2", "zero1=2"])
def test_whole_tensors_are_loaded_into_a_part_that_is_whole(plan):
    def loop(model, optimizer):
        compiled(model).up.load_state_dict(VALUES)
        model(X, LABELS).backward()
        optimizer.step()
        return parameters(model)

    agree(Classifier, plan, loop)
