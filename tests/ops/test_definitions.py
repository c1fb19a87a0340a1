"""Definitions of ops: what their docs say works, and what is missing is named with the op and the field."""

import re

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.capture.interpret import run_op
from shardwright.errors import LoweringError
from shardwright.ir import Op
from shardwright.ops import pointwise, spec, spec_of
from shardwright.ops.printing import Printing, function
from shardwright.rules import registry


class Zeta(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return torch.special.zeta(torch.tensor(3.0), self.linear(x).exp() + 1).mean()


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Compiles a model with `special_zeta`, which is defined for as long as the test runs."""
    for module, name in ((spec, "_SPECS"), (spec, "_BY_TARGET"), (registry, "_TABLE")):
        monkeypatch.setattr(module, name, dict(getattr(module, name)))

    def compile_with(**fields):
        pointwise.elementwise("special_zeta", saved="0 1", **fields)
        spec._BY_TARGET.clear()
        return sw.parallelize(Zeta(), example=(torch.rand(2, 4),), plan="single", compile={"directory": tmp_path})

    return compile_with


def test_the_example_of_a_definition_defines_an_op(compiled):
    (example,) = re.findall(r"^    (elementwise\(.*\))$", spec.__doc__, re.MULTILINE)
    eval(example, {**vars(pointwise)})
    assert hasattr(torch.ops.aten, "special_zeta") and spec_of("aten.special_zeta.default").saved == "0 1"


def test_a_function_that_torch_does_not_have_is_refused_when_it_is_compiled(compiled):
    with pytest.raises(LoweringError, match=r"has no torch\.special_zeta\. Give the op special_zeta .*`reads`"):
        compiled(prints=function)


def print_zeta(p: Printing) -> str:
    return f"torch.special.zeta({p['self']}, {p['other']})"


def test_a_printer_without_reads_is_named(compiled):
    with pytest.raises(LoweringError, match="special_zeta has no `reads`"):
        compiled(prints=print_zeta)


def test_a_printer_whose_reads_does_not_agree_is_named(compiled):
    with pytest.raises(LoweringError, match="`prints` and `reads` of special_zeta don't agree"):
        compiled(prints=print_zeta, reads="torch.zeta(self, other)")


def test_a_printer_with_its_reads_works(compiled):
    model = compiled(prints=print_zeta, reads="torch.special.zeta(self, other)")
    assert "torch.special.zeta(" in model.generated.read_text() and model(torch.rand(2, 4)).isfinite()


def test_an_op_of_the_runtime_without_runs_is_named():
    op = Op(name="/ op", target="runtime.nothing", inputs=(), outputs=())
    with pytest.raises(LoweringError, match=r"runtime.nothing.* has no `runs`"):
        run_op(op, (), {})
