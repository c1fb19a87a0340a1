"""Epochs with a smaller last batch, on many ranks, are those of one device."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import shardwright as sw
from shardwright.data import loader
from shardwright.errors import InputError
from tests.parity.threaded import world_of
from tests.runtime.ranks import run_ranks

ROWS = 13  # three batches of four, and one row


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x, y=None):
        actual = self.down(self.up(x).tanh())
        return actual if y is None else nn.functional.cross_entropy(actual, y)


@pytest.fixture(scope="module")
def net_and_data():
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(ROWS, 4, dtype=torch.float64), torch.randint(0, 3, (ROWS,)))
    return Net().double(), data


def inside(model, x, y):
    return model(x, y)


def outside(model, x, y):
    return nn.functional.cross_entropy(model(x), y)


def trained(model, optimizer, batches, loss_of, epochs=2):
    losses = []
    for _ in range(epochs):
        for x, y in batches:
            loss = loss_of(model, x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def single(net_and_data, batch, loss_of):
    net = copy.deepcopy(net_and_data[0])
    batches = loader(net_and_data[1], batch, shuffle=True, seed=2)
    losses = trained(net, torch.optim.SGD(net.parameters(), lr=0.3), batches, loss_of)
    return losses, net.state_dict()


def parallel(net_and_data, batch, loss_of, plan, inputs, directory, **options):
    def run(rank):
        net = copy.deepcopy(net_and_data[0])
        optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
        rows = batch // 2 if inputs == "per_replica" else batch
        example = [tensor[:rows] for tensor in net_and_data[1].tensors][: 1 if loss_of is outside else 2]
        model, optimizer = sw.parallelize(
            net, optimizer, plan=plan, inputs=inputs, compile={"directory": directory}, example=tuple(example)
        )
        batches = loader(net_and_data[1], batch, model=model, shuffle=True, seed=2, **options)
        return trained(model, optimizer, batches, loss_of), model.full_state_dict()

    return run_ranks(2 if plan == "auto" else world_of(plan), run)


def assert_same(actual, wanted):
    assert len(actual[0]) == len(wanted[0])
    for mine, other in zip(actual[0], wanted[0], strict=True):
        assert abs(mine - other) < 1e-10
    for key, other in wanted[1].items():
        assert float((actual[1][key] - other).abs().max()) < 1e-10, key


@pytest.mark.parametrize(
    ("plan", "inputs", "batch"),
    [
        ("dp=2", "global", 4),
        ("dp=2", "per_replica", 4),
        ("zero3=2", "per_replica", 8),
        ("dp=2,tp=2", "per_replica", 8),
        ("tp=2", "global", 8),
        ("auto", "per_replica", 4),
    ],
)
def test_the_last_batch_is_exact(tmp_path, net_and_data, plan, inputs, batch):
    for result in parallel(net_and_data, batch, inside, plan, inputs, tmp_path):
        assert_same(result, single(net_and_data, batch, inside))


def test_a_loss_outside_of_the_model_too(tmp_path, net_and_data):
    wanted = single(net_and_data, 8, outside)
    first, second = parallel(net_and_data, 8, outside, "dp=2", "per_replica", tmp_path)
    for result in (first, second):
        assert_same(([], result[1]), ([], wanted[1]))
    assert first[0][-1] == second[0][-1] == pytest.approx(wanted[0][-1], abs=1e-10)  # both have all of the last batch


def test_rows_that_fill_up_are_exact_where_labels_can_be_ignored(tmp_path, net_and_data):
    for result in parallel(net_and_data, 8, inside, "dp=2", "per_replica", tmp_path, last="pad", ignore={1: -100}):
        assert_same(result, single(net_and_data, 8, inside))


def test_a_model_with_wrong_replicas_raises(tmp_path, net_and_data):
    def run(rank):
        x, y = net_and_data[1].tensors
        model = sw.parallelize(
            copy.deepcopy(net_and_data[0]),
            plan="dp=2",
            inputs="per_replica",
            compile={"directory": tmp_path},
            example=(x[:2], y[:2]),
        )
        model.pass_whole(True)
        for _ in range(2):
            assert model(x[:3], y[:3]).item()
        for _ in range(2):  # also where a good call of these shapes has been
            with pytest.raises(InputError, match="rank 1 passes another batch than rank 0"):
                model(x[3 * rank : 3 * rank + 3], y[3 * rank : 3 * rank + 3])
        model.pass_whole(False)
        with pytest.raises(InputError, match="but all pass the same"):
            model(x[:3], y[:3])

    run_ranks(2, run)
