"""Random meshes, shapes and layouts, and what a device holds under a layout, said with numpy.

A dim is drawn as a product of factors. Every axis that cuts it takes one factor, so that cuts
come as they do in real models: plain ones, heads of (3 h e), two axes on one factor.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from shardwright.layout import INVARIANT, PARTIAL, REPLICATE, Axis, Block, Layout, Mesh, Shard, make_layout, make_shard

few = settings(max_examples=60, deadline=None)

Factors = tuple[tuple[int, ...], ...]


def mesh_of(**sizes: int) -> Mesh:
    return Mesh(axes=tuple(Axis(name=name, size=size) for name, size in sizes.items()))


@st.composite
def meshes(draw: Any, most: int = 3) -> Mesh:
    sizes = draw(st.lists(st.integers(2, 3), min_size=1, max_size=most))
    return mesh_of(**dict(zip(("dp", "tp", "ep"), sizes, strict=False)))


@st.composite
def factored(draw: Any, most: int = 3) -> Factors:
    """Shapes whose dims are products: ((3, 4, 2), (6,)) is a tensor of 24 by 6."""
    dims = draw(st.integers(1, most))
    return tuple(tuple(draw(st.lists(st.sampled_from([2, 3, 4, 6, 5]), min_size=1, max_size=2))) for _ in range(dims))


def shape_of(factors: Factors) -> tuple[int, ...]:
    return tuple(math.prod(dim) for dim in factors)


@st.composite
def layouts(draw: Any, mesh: Mesh, factors: Factors, placements: bool = True) -> Layout:
    """A layout; the last cut of a dim may be uneven, those before it divide."""
    left = [list(dim) for dim in factors]
    cuts: list[list[Shard]] = [[] for _ in factors]
    closed: set[int] = set()
    rest = {}
    for axis in draw(st.permutations(mesh.axes)):
        kind = draw(st.sampled_from(["cut", "cut", "rest"]))
        dim = draw(st.integers(0, len(factors) - 1))
        if kind == "rest" or dim in closed:
            rest[axis.name] = draw(st.sampled_from([INVARIANT, REPLICATE, PARTIAL])) if placements else INVARIANT
            continue
        at = draw(st.integers(0, len(left[dim]) - 1))
        size = left[dim][at]
        block = Block(math.prod(left[dim][:at]), size, math.prod(left[dim][at + 1 :]))
        cuts[dim].append(make_shard(axis, [block]))
        if size % axis.size:
            closed.add(dim)
        else:
            left[dim][at] = size // axis.size
    return make_layout(cuts, rest)


def kept_indices(cut: Shard, parts: int, index: int) -> list[int]:
    """The indices that a device keeps, found by laying the dim out as the docstring of layout.py draws it."""
    kept, at = [], 0
    for _ in range(cut.repeat):
        for block in cut.blocks:
            grid = at + np.arange(block.elements).reshape(block.outer, block.size, block.inner)
            chunk = -(-block.size // parts)
            kept += grid[:, index * chunk : (index + 1) * chunk].reshape(-1).tolist()
            at += block.elements
    return kept


def shard(array: np.ndarray, layout: Layout, sizes: dict[str, int], at: dict[str, int]) -> np.ndarray:
    """What a device holds of an array, cut after cut."""
    for dim, cuts in enumerate(layout.shards):
        for cut in cuts:
            assert cut.elements == array.shape[dim] or not array.shape[dim], (cut, array.shape)
            array = np.take(array, kept_indices(cut, sizes[cut.axis], at[cut.axis]), axis=dim)
    return array


def numbered(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(math.prod(shape)).reshape(shape)
