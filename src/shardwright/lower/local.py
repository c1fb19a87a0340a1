"""Local sizes and algorithms: what an op's arguments become on a rank, as its definition says (`OpSpec.localize`)."""

from __future__ import annotations

from dataclasses import replace

from ..ir import Op
from ..ops import spec_of
from ..rules import has_rule
from .custom_ops import localize_custom
from .program import LoweredProgram


def localize(program: LoweredProgram) -> LoweredProgram:
    """Rewrite every op of the body for local shapes."""
    values, layouts = dict(program.values), dict(program.layouts)
    body: list[Op] = []
    for op in program.body:
        function = spec_of(op.target).localize if has_rule(op.target) or not op.inputs else None
        if function is None:
            body.append(localize_custom(program, op))
            continue
        localized = function(program, op)
        for new in localized if isinstance(localized, tuple) else (localized,):
            for name in new.outputs:
                if name not in values:  # a local sum before its division: laid out as the result
                    values[name] = replace(values[op.outputs[0]], name=name)
                    layouts[name] = layouts[op.outputs[0]]
            body.append(new)
    return program.with_(body=tuple(body), values=values, layouts=layouts)
