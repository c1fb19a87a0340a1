"""What a rule says about an op's arguments on a rank: those that hold the size of a label get the rank's own.

This serves ops that no localizer knows: registered functions ("b (h d) -> b h d" with an argument h)
and rules found by probing.
"""

from __future__ import annotations

from ..ir import Op
from ..rules import Signature
from .program import Factor, Program, Size


def own_sizes(program: Program, op: Op) -> Op:
    """The op with local sizes in the arguments that its rule names."""
    signature = program.facts.signatures.get(op.name)
    if signature is None or signature.rule is None or not signature.rule.local:
        return op
    axes = _axes(program, op, signature)
    arguments = dict(op.arguments)
    for path, labels in signature.rule.local.items():
        held = [atom for label in labels for atom in program.facts.atoms.expand(signature.labels.get(label, ()))]
        if not any(atom in axes for atom in held):
            continue
        name, _, at = path.partition(".")
        whole = arguments[name][int(at)] if at else arguments[name]
        size = _size(program, whole, held, axes)
        arguments[name] = _put(arguments[name], int(at), size) if at else size
    return op.with_arguments(**arguments)


def _axes(program: Program, op: Op, signature: Signature) -> dict[int, tuple[str, ...]]:
    """The axes that take each atom of the op, major to minor."""
    found: dict[int, tuple[str, ...]] = {}
    chosen = (program.choices or {}).get(op.name, {})
    roles = {role.name: role for role in signature.roles}
    for axis in program.mesh.names:
        role = roles.get(chosen.get(axis, ""))
        if role is not None:
            found[role.atom] = (*found.get(role.atom, ()), axis)
    return found


def _size(program: Program, whole: int, held: list[int], axes: dict[int, tuple[str, ...]]) -> Size:
    """`whole` as a product of atoms and of what is left of it."""
    factors = [Factor(program.facts.atoms.size[atom], atom, axes.get(atom, ())) for atom in held]
    rest = whole
    for factor in factors:
        rest //= factor.size
    return Size(((*((Factor(rest),) if rest != 1 else ()), *factors),))


def _put(values: tuple[object, ...], at: int, value: object) -> tuple[object, ...]:
    return (*values[:at], value, *values[at + 1 :])
