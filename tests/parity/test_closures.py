"""Functions of submodules among a model's attributes are trained, and what is not the model's is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwright.errors import CaptureError
from shardwright.parallelize import parallelize
from shardwright.verify import verify
from tests.models.closures import WAYS, ClosureNet, TwoLayers, replaced_forward
from tests.runtime.ranks import run_ranks
from tests.verified import referred, verified

from .looped import gradients
from .threaded import world_of

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def same_gradients(make, plan, folder):
    def model():
        torch.manual_seed(0)
        return make().double()

    wanted = model()
    wanted(X).backward()
    models = [model() for _ in range(world_of(plan))]

    def run(rank):
        compiled = parallelize(models[rank], plan=plan, compile={"directory": folder})
        compiled(X).backward()
        return gradients(compiled)

    for result in run_ranks(world_of(plan), run):
        for mine, other in zip(result, gradients(wanted), strict=True):
            assert other.abs().max() > 0
            torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero3=2"])
def test_a_lambda_over_submodules_is_trained(plan, tmp_path):
    same_gradients(ClosureNet, plan, tmp_path)


@pytest.mark.parametrize("how", WAYS)
def test_a_replaced_forward_is_trained(how, tmp_path):
    same_gradients(lambda: replaced_forward(how), "dp=2", tmp_path)


def test_verify_compares_with_a_model_that_is_trained():
    reference = referred(ClosureNet(), (torch.randn(4, 8),))

    gradient = reference.run.steps[0].gradients["blocks.0.mlp.c_fc.weight"]

    assert gradient is not None
    assert gradient.abs().max() > 0
    assert verified(reference, "dp=2")


GLOBAL = TwoLayers()


class ReadsGlobal(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        return self.head(GLOBAL.first(x)).mean()


class HidesModules(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.hidden = nn.Linear(8, 8), [nn.Linear(8, 8)]

    def forward(self, x):
        with torch.no_grad():
            x = self.hidden[0](x)
        return self.head(x).mean()


@pytest.mark.parametrize("kind", [ReadsGlobal, HidesModules])
def test_a_parameter_that_is_not_the_models_is_refused(kind, tmp_path):
    with pytest.raises(CaptureError, match=r"is not a parameter of the model(.|\n)*nn.ModuleList") as error:
        parallelize(kind(), plan="single", compile={"directory": tmp_path})(torch.randn(2, 8))
    assert "test_closures.py" in str(error.value)


@pytest.mark.parametrize("kind", [ReadsGlobal, HidesModules])
def test_verify_refuses_it_too(kind):
    with pytest.raises(CaptureError, match="is not a parameter of the model"):
        verify(kind(), "single", example=(torch.randn(2, 8),))


def test_a_plain_tensor_that_requires_a_gradient_is_refused(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.scales = nn.Linear(8, 8), [torch.ones(8, requires_grad=True)]

        def forward(self, x):
            return self.head(x * self.scales[0]).mean()

    with pytest.raises(CaptureError, match="requires a gradient"):
        parallelize(Net(), plan="single", compile={"directory": tmp_path})(torch.randn(2, 8))
