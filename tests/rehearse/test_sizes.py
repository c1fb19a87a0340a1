"""Small sizes under which a plan shares everything as it does at the real ones."""

import pytest
import torch
from torch import nn

from shardwright.capture import capture
from shardwright.errors import PlanError
from shardwright.rehearse.sizes import Shared, choose_sizes, small_axes
from shardwright.rules import analyse


class Shapes(nn.Module):
    """A net whose inputs have the sizes that a test wants."""

    def forward(self, *xs):
        return sum(x.sum() for x in xs)


def analysis_of(*sizes):
    graph = capture(Shapes(), tuple(torch.zeros(size) for size in sizes), {}, entry="train").graph
    analysis = analyse(graph)
    dims = (analysis.dims[source.value][0] for source in graph.inputs)
    atoms = {size: analysis.atoms.expand(dim)[0] for size, dim in zip(sizes, dims, strict=True)}
    return analysis, atoms


def images(sizes, shared, axes):
    analysis, atoms = analysis_of(*sizes)
    uses = [Shared(atoms[size], tuple((name, axes[name]) for name in names)) for size, names in shared]
    few = next(small_axes(analysis, uses, axes, 1))
    return choose_sizes(analysis, uses, few).images, few


def test_what_divides_divides_and_larger_stays_larger():
    small, few = images([64, 4096, 131072], [(64, ["tp"]), (131072, ["tp", "dp"])], {"tp": 8, "dp": 64})

    assert few["tp"] == few["dp"] == 2
    assert small[64] % 2 == 0 and small[131072] % 4 == 0
    assert small[64] < small[4096] < small[131072] < 16


def test_what_does_not_divide_does_not_and_the_axis_has_three():
    small, few = images([50257], [(50257, ["tp"])], {"tp": 8})

    assert few["tp"] == 3
    assert small[50257] % 3 and small[50257] > 3


def test_a_device_that_gets_nothing_still_gets_nothing():
    small, few = images([5], [(5, ["tp"])], {"tp": 8})

    assert small[5] < few["tp"] == 3


def test_one_row_a_device_stays_one():
    small, _ = images([8, 64, 512], [(512, ["dp", "tp"]), (8, ["tp"])], {"dp": 64, "tp": 8})

    assert small[512] == 4


def test_what_differs_by_one_still_does():
    small, _ = images([2047, 2048, 8192], [(2048, ["sp"])], {"sp": 8})

    assert small[2048] - small[2047] == 1
    assert small[2048] % 2 == 0


def test_an_axis_is_longer_if_that_is_the_only_way():
    analysis, atoms = analysis_of(8)
    uses = [Shared(atoms[8], (("tp", 2), ("dp", 8))), Shared(atoms[8], (("dp", 8),))]
    tried = list(small_axes(analysis, uses, {"dp": 8, "tp": 2}, 1))

    with pytest.raises(PlanError, match="shards a size of 8 over"):
        choose_sizes(analysis, uses, tried[0])
    fitting = next(few for few in tried if _fits(analysis, uses, few))
    assert fitting["dp"] == 4


def _fits(analysis, uses, few):
    try:
        choose_sizes(analysis, uses, few)
    except PlanError:
        return False
    return True
