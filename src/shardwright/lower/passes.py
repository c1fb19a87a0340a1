"""The list of passes, in order. Each takes a program and gives a program; each can be printed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..ir import Graph
from ..layout import Layout
from ..plan import Plan
from ..rules import Analysis, analyse
from .check import check
from .local import localize
from .overlap import awaited_later, count_early, in_place, overlap
from .place import Placer, check_edges
from .program import Program
from .tidy import fold_bias, fold_mean, fuse, hoist, loosen, prune

Pass = Callable[[Program], Program]

PASSES: tuple[tuple[str, Pass], ...] = (
    ("check edges: every input has the layout its op asks for", check_edges),
    ("prune: ops nobody reads", prune),
    ("fuse: reductions in a row over several axes", fuse),
    ("localize: sizes and algorithms of this rank", localize),
    ("loosen: views of a share are reshapes", loosen),
    ("count early: labels are counted as soon as they are there", count_early),
    ("fold mean: a loss and the count of its labels in one sum", fold_mean),
    ("hoist: constants, computed once", hoist),
    ("fold bias: products and their biases in one call", fold_bias),
    ("awaited later: sums that only the user reads", awaited_later),
    ("in place: sums of what nobody else reads", in_place),
    ("overlap: sums of gradients beside the products of weights' gradients", overlap),
)


def lower(
    graph: Graph,
    plan: Plan,
    facts: Analysis | None = None,
    *,
    homes: Mapping[str, Layout] | None = None,
    mode: str = "same",
    show: Callable[[str, Program], None] | None = None,
) -> Program:
    """The program for a graph under a plan. `homes` fixes how parameters are held (entries after the first)."""
    plan.check_against(graph)
    program = Placer(graph, plan, facts or analyse(graph), homes, mode).run()
    if show is not None:
        show("place: layouts and converters", program)
    for name, step in PASSES:
        program = check(step(program))
        if show is not None:
            show(name, program)
    return program
