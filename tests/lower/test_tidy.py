"""Passes that make a program shorter leave alone what something else reads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardwright.lower.tidy import _per_channel
from shardwright.parallelize import parallelize
from tests.lower.test_local import first, program_of
from tests.parity.threaded import compare


class Biased(nn.Module):
    """A product whose bias is added by hand; the product itself may be read too."""

    def __init__(self, read_twice: bool) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, 8)), nn.Parameter(torch.randn(6))
        self.read_twice = read_twice

    def forward(self, x: Tensor) -> Tensor:
        product = nn.functional.linear(x, self.weight)
        total = (product + self.bias).square().sum()
        return total + product.sum() if self.read_twice else total


@pytest.mark.parametrize("read_twice", [False, True])
def test_a_bias_goes_into_its_product_unless_the_product_is_read_too(read_twice: bool) -> None:
    program = program_of(Biased(read_twice), (torch.randn(4, 8),), "dp=2")
    (product,) = first(program, "aten.linear.default")
    assert (product.argument("bias") is None) == read_twice


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "single"])
def test_the_product_without_its_bias_is_what_the_other_reader_gets(plan: str) -> None:
    compare(Biased(True), (torch.randn(4, 8),), plan)


class Added(nn.Module):
    """A product, and a parameter of any shape and dtype that is added to it."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, computed: bool = False) -> None:
        super().__init__()
        self.product, self.computed = nn.Linear(8, 6, bias=False), computed
        self.term = nn.Parameter(torch.randn(shape, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (self.product(x) + (self.term.tanh() if self.computed else self.term)).square().sum()


@pytest.mark.parametrize(
    ("shape", "dtype", "computed", "folded"),
    [((6,), torch.float32, False, True), ((6,), torch.float32, True, True), ((6,), torch.float64, False, False),
     ((), torch.float32, False, False), ((1,), torch.float32, False, False), ((4, 6), torch.float32, False, False),
     ((2, 4, 6), torch.float32, False, False)],
)  # fmt: skip
def test_a_bias_is_a_vector_of_the_product_s_dtype(shape, dtype, computed, folded, tmp_path) -> None:
    module, x = Added(shape, dtype, computed), torch.randn(4, 8)
    (product,) = first(program_of(module, (x,), "single"), "aten.linear.default")
    assert (product.argument("bias") is not None) == folded
    wanted = module(x)
    torch.testing.assert_close(parallelize(module, plan="single", compile={"directory": tmp_path})(x), wanted)


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).square().sum()


@pytest.mark.parametrize(("shape", "folded"), [((4, 3, 5, 5), True), ((3, 5, 5), False)])
def test_a_bias_goes_into_a_convolution_of_a_batch(shape: tuple[int, ...], folded: bool) -> None:
    program = program_of(Convolved(), (torch.randn(shape),), "single")
    (conv,) = first(program, "aten.conv2d.default")
    assert (conv.argument("bias") is not None) == folded


class Shifted(nn.Module):
    """A convolution whose channels are shifted by what another layer says, one row for all images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.shift = nn.Conv2d(3, 5, 3, bias=False), nn.Linear(2, 5)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return (self.conv(x) + self.shift(time).view(1, 5, 1, 1)).square().sum()


def test_a_row_that_is_viewed_as_channels_is_no_bias(tmp_path) -> None:
    module, call = Shifted(), (torch.randn(4, 3, 5, 5), torch.randn(1, 2))
    wanted = module(*call)
    torch.testing.assert_close(parallelize(module, plan="single", compile={"directory": tmp_path})(*call), wanted)


@pytest.mark.parametrize(
    ("bias", "out", "fits"),
    [((5, 1, 1), (4, 5, 3, 3), True), ((1, 5, 1, 1), (4, 5, 3, 3), True), ((1, 5, 1), (4, 5, 3, 3), False),
     ((3, 1, 1), (4, 5, 3, 3), False), ((5, 1), (4, 5, 3, 3), False), ((5, 3, 1), (4, 5, 3, 3), False)],
)  # fmt: skip
def test_only_what_is_added_to_channels_is_a_bias(bias: tuple[int, ...], out: tuple[int, ...], fits: bool) -> None:
    assert _per_channel(bias, out) == fits


class Row(nn.Module):
    """Two products in a row: under tp the second is a partial sum, to which the bias comes after it is summed."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).square().mean()


def test_a_bias_stays_out_of_a_product_that_is_still_to_be_summed() -> None:
    program = program_of(Row(), (torch.randn(4, 6),), "tp=2")
    summed = next(op for op in program.body if op.target.startswith("comm.all_reduce"))
    product = next(op for op in program.body if summed.inputs[0] in op.outputs)
    assert product.target == "aten.linear.default" and product.argument("bias") is None


class Twice(nn.Module):
    """A sum over rows that is read before and after its second half: a mean of means."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.up(x).sum(1)
        return rows.sum().square() + rows.square().sum() + rows.sum().exp().log()


@pytest.mark.parametrize("plan", ["dp=2,tp=2", "tp=2"])
def test_sums_over_two_axes_are_one_only_where_nothing_reads_between(plan: str) -> None:
    compare(Twice(), (torch.randn(4, 6),), plan)
