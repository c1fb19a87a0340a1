"""The list of passes, in order. Each takes a program and gives a program; each can be printed."""

from __future__ import annotations

from collections.abc import Callable

from .check import check
from .chunked_loss import chunk_losses, chunk_where_possible
from .local import localize
from .overlap import awaited_later, count_early, in_place, overlap, put_off
from .place import Placer, check_edges
from .program import LoweredProgram
from .prologue import check_time, prologue
from .tidy import fold_bias, fold_mean, hoist, prune, relax_layouts

Pass = Callable[[LoweredProgram], LoweredProgram]

PASSES: tuple[tuple[str, Pass], ...] = (
    ("check edges: every input has the layout its op asks for", check_edges),
    ("prune: ops nobody reads", prune),
    ("localize: sizes and algorithms of this rank", localize),
    ("loosen: views of a share are reshapes", relax_layouts),
    ("prologue: what all microbatches need", prologue),
    ("check time: nothing needs another microbatch", check_time),
    ("count early: labels are counted as soon as they are there", count_early),
    ("fold mean: a loss and the count of its labels in one sum", fold_mean),
    ("hoist: constants, computed once", hoist),
    ("fold bias: products and their biases in one call", fold_bias),
    ("chunked losses: a linear and the loss of its logits in one call", chunk_losses),
    ("awaited later: sums that only the user reads", awaited_later),
    ("in place: sums of what nobody else reads", in_place),
    ("put off: products that give weights' gradients wait for their step", put_off),
    ("overlap: sums of gradients beside the products of weights' gradients", overlap),
)


CHECKS = (check_edges, check_time)
"""The passes that only look."""


def run(placer: Placer, show: Callable[[str, LoweredProgram], None] | None = None) -> LoweredProgram:
    """Place, and run all passes."""
    program = placer.run()
    if show is not None:
        show("place: layouts and reshards", program)
    for name, step in PASSES:
        program = check(step(program))
        if show is not None:
            show(name, program)
    return program


def transform(placer: Placer) -> LoweredProgram:
    """The same program, unchecked: a search lowers many candidates, and the one that it takes is lowered again."""
    program = placer.run()
    for _, step in PASSES:
        if step is chunk_losses:
            program = chunk_where_possible(program)
        elif step not in CHECKS:
            program = step(program)
    return program
