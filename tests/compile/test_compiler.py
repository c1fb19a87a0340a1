"""The compiler is a function of a description of a call: it returns values, and writes into no model."""

import dataclasses

import pytest
import torch
from torch import nn

from shardwright.compile import Compiler, CompilerSettings
from shardwright.errors import CaptureError
from shardwright.plan.request import PlanRequest
from shardwright.runtime.model.parallel_model import ParallelModel
from shardwright.runtime.model.specialization import ModelCall
from shardwright.runtime.world import start

X = torch.randn(4, 8, dtype=torch.float64)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.up(x).relu())

    def fails(self, x):
        return self.down(x.numpy())


def compiler_of(net, folder, optimizer=None):
    return Compiler(net, optimizer, start(), CompilerSettings(request=PlanRequest.read("single"), directory=folder))


def call(compiler, **changes):
    usual = {
        "skeleton": compiler.skeleton, "args": (X,), "kwargs": {}, "training": True, "passing": "global",
        "plan": None, "state": None, "gather": dict,
    }  # fmt: skip
    return ModelCall(**{**usual, **changes})


def test_a_call_is_compiled_without_a_model(tmp_path):
    net = Net().double()
    compiled = compiler_of(net, tmp_path)(call(compiler_of(net, tmp_path)))

    (result,) = compiled.specialization.stage.forward(X)
    torch.testing.assert_close(result, net(X))
    assert compiled.plan.policy == "single" and compiled.flops > 0
    assert set(compiled.state.parameters) == set(dict(net.named_parameters()))
    with pytest.raises(dataclasses.FrozenInstanceError):
        compiled.plan = None


def test_the_optimizer_and_the_original_change_when_the_result_is_installed(tmp_path):
    net = Net().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = list(optimizer.param_groups[0]["params"])
    compiler = compiler_of(net, tmp_path, optimizer)
    compiled = compiler(call(compiler))
    assert all(mine is known for mine, known in zip(optimizer.param_groups[0]["params"], before, strict=True))
    assert list(compiled.replaced.originals) == [name for name, _ in net.named_parameters()]

    model = ParallelModel(compiler_of(Net().double(), tmp_path / "again", None))
    assert model.plan is None
    model.prepare((X,), {})
    assert model.plan.policy == "single"


def test_what_later_calls_keep_to_is_remembered(tmp_path):
    compiler = compiler_of(Net().double(), tmp_path)
    first = compiler(call(compiler))
    second = compiler(call(compiler, training=False, plan=first.plan, state=first.state))

    assert list(second.plan.entries) == ["train", "eval"]
    assert second.state is first.state and second.replaced is None and second.flops is None


def test_a_call_that_fails_leaves_the_compiler_as_it_was(tmp_path):
    net = Net().double()
    compiler = compiler_of(net, tmp_path)
    with pytest.raises(CaptureError):
        compiler(call(compiler, method="fails"))

    assert compiler.original is net and not compiler.programs
    assert compiler(call(compiler)).plan.policy == "single"
