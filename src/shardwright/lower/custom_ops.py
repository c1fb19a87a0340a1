"""Ops that no localizer knows, on a rank: registered ones, and those whose rules were found by probing.

Arguments that hold the size of a label get the rank's own ("b (h d) -> b h d" with an argument h). A
split that the user has an algorithm for calls that algorithm.
"""

from __future__ import annotations

from dataclasses import replace

from ..errors import LoweringError
from ..ir import Op
from ..rules import Signature
from .program import LoweredProgram, Size, SizeFactor, flat


def localize_custom(program: LoweredProgram, op: Op) -> Op:
    """The op as a rank calls it."""
    return custom_algorithm(program, custom_sizes(program, op))


def axes_by_algorithm(program: LoweredProgram, op: Op) -> dict[str, str]:
    """The axes along which an algorithm does the split of an op, with the label that each splits."""
    signature = program.analysis.signatures.get(op.name)
    if signature is None or signature.rule is None or not signature.rule.algorithms:
        return {}
    chosen = (program.choices or {}).get(op.name, {})
    roles = {axis: signature.picked(chosen.get(axis)) for axis in program.mesh.names}
    return {axis: role.label for axis, role in roles.items() if role and role.label in signature.rule.algorithms}


def custom_algorithm(program: LoweredProgram, op: Op) -> Op:
    """A call of the user's algorithm, where one does the split."""
    axes = axes_by_algorithm(program, op)
    if not axes:
        return op
    if len(axes) > 1:
        raise LoweringError(
            f"{op}: a custom algorithm splits on one axis only, and the plan asks for {', '.join(axes)}"
        )
    ((axis, label),) = axes.items()
    signature = program.analysis.signatures[op.name]
    by_name = not op.target.startswith("call.")  # a library op leaves defaults out
    arguments = (
        ("path", op.target),
        ("label", label),
        ("axes", (axis,)),
        ("size", program.analysis.atoms.product(signature.labels[label])),
        ("given", tuple((name if by_name else "", value) for name, value in op.arguments)),
    )
    return replace(op, target="runtime.custom_algorithm", arguments=arguments)


def custom_sizes(program: LoweredProgram, op: Op) -> Op:
    """The op with local sizes in the arguments that its rule names."""
    signature = program.analysis.signatures.get(op.name)
    if signature is None or signature.rule is None or not signature.rule.local:
        return op
    arguments = dict(op.arguments)
    for path, labels in signature.rule.local.items():
        axes = _axes(program, op, signature, labels)
        dim = tuple(atom for label in labels for atom in signature.labels.get(label, ()))
        sections = flat(program.analysis.atoms, dim, axes)
        if not any(atom in axes for section in sections for atom in section):
            continue
        name, _, at = path.partition(".")
        total = arguments[name][int(at)] if at else arguments.get(name)  # a default is not among the arguments
        size = _size(program, total, dim, sections, axes)
        arguments[name] = _put(arguments[name], int(at), size) if at else size
    return op.with_arguments(**arguments)


def _axes(program: LoweredProgram, op: Op, signature: Signature, labels: tuple[str, ...]) -> dict[int, tuple[str, ...]]:
    """The axes that take each atom of some labels, major to minor.

    Another label may be of the same atom, as where a batch is as large as a number of groups and stands for both.
    """
    axes: dict[int, tuple[str, ...]] = {}
    chosen = (program.choices or {}).get(op.name, {})
    together = {*labels, *_split_together(signature, labels)}
    for axis in program.mesh.names:
        role = signature.picked(chosen.get(axis))
        if role is not None and role.label in together:
            axes[role.atom] = (*axes.get(role.atom, ()), axis)
    return axes


def _split_together(signature: Signature, labels: tuple[str, ...]) -> set[str]:
    """The labels of sections beside these: they are split together."""
    sectioned = [dim for bound in (*signature.inputs, *signature.outputs) for dim in bound.dims if len(dim) > 1]
    named = [{label for section in dim for label in section} for dim in sectioned]
    return {label for row in named if not row.isdisjoint(labels) for label in row}


def _size(
    program: LoweredProgram,
    total: int | None,
    dim: tuple[int, ...],
    sections: list[tuple[int, ...]],
    axes: dict[int, tuple[str, ...]],
) -> Size:
    """`total` as a sum of products of atoms, and of what is left of it."""
    atoms = program.analysis.atoms
    rest = 1 if total is None else total // atoms.product(dim)
    lead = (SizeFactor(rest),) if rest != 1 else ()
    return Size(
        tuple((*lead, *(SizeFactor(atoms.size[a], a, axes.get(a, ())) for a in section)) for section in sections)
    )


def _put(values: tuple[object, ...], at: int, value: object) -> tuple[object, ...]:
    return (*values[:at], value, *values[at + 1 :])
