"""What a verb of a policy is about: a string as people write it, or `select(...)`, as a `Target`."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import PlanError
from ..ir import Graph
from .constraint_kinds import LINE, Target

Names = str | Sequence[str]
Selection = str | Target | Sequence[str]
"""A module path, the name of an op, a line, the key of a parameter (each with stars), several of these, or `select`."""


def select(
    module: Names = (), *, type: Names = (), op: Names = (), line: Names = (), parameter: Names = ()
) -> Target:  # fmt: skip
    """Ops to which all that is said applies; of several names any will do.

    module     a path ("blocks.*.mlp"); what is inside is meant too
    type       the class of a module ("LayerNorm")
    op         a kind ("linear", "aten.linear"), or a name as plan files have it ("blocks.*.up / linear")
    line       of the model's source ("gpt.py:40", "gpt.py:40-52")
    parameter  a key of the state dict ("blocks.*.up.weight"): the ops that read it
    """
    return Target(
        modules=_names(module), classes=_names(type), ops=_names(op), lines=_names(line), parameters=_names(parameter)
    )


def _names(names: Names) -> tuple[str, ...]:
    every = (names,) if isinstance(names, str) else tuple(names)
    if not all(isinstance(name, str) and name for name in every):
        raise PlanError(f"{names!r} does not select anything; write a name, or several")
    return every


def read_selection(graph: Graph, selection: Selection) -> Target:
    """The target of a selection. All names of a list are of one kind."""
    if isinstance(selection, Target):
        return selection
    if selection == "":
        return Target()
    names = _names(selection)
    kinds = {_kind(graph, name) for name in names}
    if len(kinds) > 1:
        raise PlanError(
            f"{', '.join(names)} are names of different kinds ({', '.join(sorted(kinds))}); select those of one kind"
        )
    return Target(**{kinds.pop(): names})


def _kind(graph: Graph, name: str) -> str:
    """The field of a `Target` that a name is for."""
    if "/ " in name:
        return "ops"
    if LINE.fullmatch(name):
        return "lines"
    inside = any(Target(modules=(name,)).place(path, {}) for path in (*graph.classes, *graph.under))
    keys = [key for parameter in graph.parameters for key in parameter.keys]
    return "parameters" if not inside and Target(parameters=(name,)).has_parameter(keys) else "modules"
