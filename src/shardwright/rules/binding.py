"""A graph's dims as atoms and its ops' rules as signatures: `analyse` goes over the graph once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from ..errors import PlanError
from ..ir import Graph, Op
from . import notation
from .atoms import Atoms, Dim
from .notation import Rule, Term
from .random_ops import constants_of, is_random
from .registry import OpCall, find_rule
from .signature import Analysis, LabelledTensor, Signature

Find = Callable[[OpCall], "tuple[Rule | None, str]"]
"""How the rule of a call is found; without one, why there is none."""


def has_written_rule(call: OpCall) -> tuple[Rule | None, str]:
    """The rule that somebody wrote, and no other."""
    return find_rule(call), ""


def analyse(graph: Graph, find: Find = has_written_rule) -> Analysis:
    """Give every dim its atoms and every op its signature."""
    atoms = Atoms()
    dims: dict[str, tuple[Dim, ...]] = {}
    batch: Dim = atoms.fresh(graph.batch) if graph.batch else ()
    for item in graph.inputs:
        shape = graph.values[item.value].shape
        lead = [batch] if batch and graph.is_batched(item) else []
        dims[item.value] = (*lead, *(atoms.fresh(size) for size in shape[len(lead) :]))
    for name in (*(p.value for p in graph.parameters), *(b.value for b in graph.buffers)):
        dims[name] = tuple(atoms.fresh(size) for size in graph.values[name].shape)
    signatures: dict[str, Signature] = {}
    analysis = Analysis(graph, atoms, dims, signatures, batch, constants_of(graph))
    for op in graph.ops:
        signatures[op.name] = _bind(op, analysis, find)
    atoms.freeze()
    return analysis


def _bind(op: Op, analysis: Analysis, find: Find) -> Signature:
    graph = analysis.graph
    inputs = tuple(graph.values[name] for name in op.inputs)
    outputs = tuple(graph.values[name] for name in op.outputs)
    rule, why = (None, "") if is_random(op) else find(OpCall(op, inputs, outputs))
    labels: dict[str, Dim] = {}
    blocked: set[str] = set(rule.blocked) if rule else set()
    bound_in: list[LabelledTensor] = []
    bound_out: list[LabelledTensor] = []
    if rule is not None and (len(rule.inputs), len(rule.outputs)) != (len(inputs), len(outputs)):
        raise PlanError(
            f"the rule {rule.text!r} of {op} has {len(rule.inputs)} inputs and {len(rule.outputs)} outputs, "
            f"the call has {len(inputs)} and {len(outputs)}"
        )
    terms = rule.inputs if rule else (Term(anything=True),) * len(inputs)
    for term, value in zip(terms, inputs, strict=True):
        patterns = tuple(_patterns(term, len(value.shape), op))
        bound_in.append(LabelledTensor(value.name, patterns, term.linear, term.bias))
        for pattern, dim, size in zip(patterns, analysis.dims[value.name], value.shape, strict=True):
            _bind_input(pattern, dim, size, rule, labels, blocked, analysis.atoms)
    terms = rule.outputs if rule else (Term(anything=True),) * len(outputs)
    for term, value in zip(terms, outputs, strict=True):
        patterns = tuple(_patterns(term, len(value.shape), op))
        bound_out.append(LabelledTensor(value.name, patterns))
        analysis.dims[value.name] = tuple(
            _bind_output(pattern, size, rule, labels, analysis.atoms)
            for pattern, size in zip(patterns, value.shape, strict=True)
        )
    return Signature(op, rule, tuple(bound_in), tuple(bound_out), labels, frozenset(blocked), analysis, why)


def _patterns(term: Term, rank: int, op: Op) -> Iterator[notation.Dim]:
    """The pattern of each dim; a '*' stands for the dims in front, numbered from the right."""
    if term.anything:
        yield from (((),) for _ in range(rank))
        return
    lead = rank - len(term.dims)
    if lead < 0 or (lead and not term.star):
        raise PlanError(f"a rule of {op} has {len(term.dims)} dims where the tensor has {rank}")
    for at in range(lead):
        yield ((f"*{lead - at}",),)
    yield from term.dims


def _bind_input(
    pattern: notation.Dim,
    dim: Dim,
    size: int,
    rule: Rule | None,
    labels: dict[str, Dim],
    blocked: set[str],
    atoms: Atoms,
) -> None:
    names = [label for section in pattern for label in section]
    if not names or rule is None:
        return
    if len(names) == 1:
        groups: list[Dim] | None = [dim]
    elif len(pattern) == 1:
        groups = atoms.divide(dim, _sizes(names, size, rule, labels, atoms))
    else:
        groups = atoms.divide_row(dim, [_sizes(list(section), 0, rule, labels, atoms)[0] for section in pattern])
    if groups is None:  # this op can't be split there; what comes out is made of new atoms
        blocked.update(names)
        groups = [atoms.fresh(size) for size in _sizes(names, size, rule, labels, atoms)]
    for label, group in zip(names, groups, strict=True):
        if label in labels:
            atoms.unify(labels[label], group)
        else:
            labels[label] = group


def _sizes(names: list[str], size: int, rule: Rule, labels: dict[str, Dim], atoms: Atoms) -> list[int]:
    """Sizes of the labels of a product; at most one is inferred from the dim."""
    sizes = [
        rule.sizes[name] if name in rule.sizes else atoms.product(labels[name]) if name in labels else None
        for name in names
    ]
    known = math.prod(known_size or 1 for known_size in sizes)
    return [known_size if known_size is not None else size // known for known_size in sizes]


def _bind_output(pattern: notation.Dim, size: int, rule: Rule | None, labels: dict[str, Dim], atoms: Atoms) -> Dim:
    if rule is None or not any(pattern):
        return atoms.fresh(size)
    sections: list[Dim] = []
    for section in pattern:
        for label in section:
            if label not in labels:
                labels[label] = atoms.fresh(_sizes(list(section), size, rule, labels, atoms)[section.index(label)])
        sections.append(tuple(atom for label in section for atom in labels[label]))
    dim = atoms.row(sections)
    return dim if atoms.product(dim) == size else atoms.fresh(size)
