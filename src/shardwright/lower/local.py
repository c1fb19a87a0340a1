"""Local sizes and algorithms: what an op's arguments become on a rank, as its definition says (`OpSpec.localize`)."""

from __future__ import annotations

from dataclasses import replace

from ..errors import LoweringError
from ..ir import Op
from ..ops import op_kind, spec_of
from ..rules import has_rule
from .custom_ops import axes_by_algorithm, localize_custom
from .program import LoweredProgram


def localize(program: LoweredProgram) -> LoweredProgram:
    """Rewrite every op of the body for local shapes."""
    values, layouts = dict(program.values), dict(program.layouts)
    body: list[Op] = []
    for op in program.body:
        function = spec_of(op.target).localize if has_rule(op.target) or not op.inputs else None
        localized = function(program, op) if function is not None else localize_custom(program, op)
        new_ops = localized if isinstance(localized, tuple) else (localized,)
        _check_algorithm(program, op, new_ops)
        for new in new_ops:
            for name in new.outputs:
                if name not in values:  # a local sum before its division: laid out as the result
                    values[name] = replace(values[op.outputs[0]], name=name)
                    layouts[name] = layouts[op.outputs[0]]
            body.append(new)
    return program.with_(body=tuple(body), values=values, layouts=layouts)


def _check_algorithm(program: LoweredProgram, op: Op, localized: tuple[Op, ...]) -> None:
    """A split by an algorithm must have become a call of it: the op itself would look at one shard only."""
    axes = [axis for axis in axes_by_algorithm(program, op) if program.mesh.sizes[axis] > 1]
    custom = op_kind(op.target) == op.target  # its algorithm is found by its name
    called = any(new.target.startswith("runtime.") for new in localized)
    if axes and not (called and (custom or spec_of(op.target).localize is not None)):
        raise LoweringError(
            f"{op}: the rule splits it by an algorithm over {' and '.join(axes)}, but its definition in ops/ has no "
            "localize that calls the algorithm; add one (CONTRIBUTING.md)"
        )
