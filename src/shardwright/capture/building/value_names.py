"""Names for values: the user's own where the source has one, so that generated code reads like the model.

x = block(x)                     what `block` returns is x, also where its forward ends in `return x + y`
y = self.norm(self.up(x))        y; what comes before it on the line goes by its module: `up`
q.view(b, s, h, e)               a view goes by the name of what it shows: q
return F.cross_entropy(...)      an output goes by its role: `loss`; an update by its buffer: `running_mean`
torch.cumsum(...)                anything else by its op: `cumsum`
"""

from __future__ import annotations

import keyword
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache

from ...ir import SourceLine
from ...ops import spec_of
from .graph_builder import DraftOp, GraphBuilder


def value_names(
    builder: GraphBuilder, fixed: Mapping[str, str], roles: Mapping[str, str] | None = None
) -> dict[str, str]:
    """A readable, unique name for every value.

    fixed   the names of what no step makes
    roles   names of values by what they are for, such as the buffer that they update
    """
    options = dict(fixed)
    last: dict[tuple[str, str, int], int] = {}
    for index, step in enumerate(builder.steps):
        if step.place.source:
            last[step.place.owner, step.place.source.file, step.place.source.line] = index
    for index, step in enumerate(builder.steps):
        source = step.place.source
        assigned: tuple[str, ...] = ()
        if source and (last[step.place.owner, source.file, source.line] == index or _ends_line(builder.steps, index)):
            assigned = _assigned(builder.steps, index)
        for number, name in enumerate(step.outputs):
            role = (roles or {}).get(name) or _returned_name(builder.steps, index)
            written = builder.names.get(name) or _assigned_name(step, assigned, number)
            options[name] = written or role or _own_name(step, options)
    return _numbered(options)


def _numbered(options: Mapping[str, str]) -> dict[str, str]:
    """Each name once: a second x is x_1."""
    count: Counter[str] = Counter()
    used: set[str] = set()
    names: dict[str, str] = {}
    for name, option in options.items():
        chosen = option
        while chosen in used:
            count[option] += 1
            chosen = f"{option}_{count[option]}"
        used.add(chosen)
        names[name] = chosen
    return names


def _ends_line(steps: Sequence[DraftOp], index: int) -> bool:
    """Whether the next step is on another line (a helper function called twice has two such ends)."""
    here = steps[index].place
    after = steps[index + 1].place if index + 1 < len(steps) else None
    return here.path == here.owner and (after is None or (after.owner, after.source) != (here.owner, here.source))


def _assigned(steps: Sequence[DraftOp], index: int) -> tuple[str, ...]:
    """What the line that a step ends assigns to. A line that returns goes on in the line that called it."""
    here = steps[index].place
    assert here.source is not None
    lines = (*here.callers, here.source)
    for depth in range(len(lines) - 1, -1, -1):
        names = assignment(lines[depth].code)
        if names or not lines[depth].code.startswith("return ") or _goes_on(steps, index, lines[:depth]):
            return names
    return ()


def _goes_on(steps: Sequence[DraftOp], index: int, callers: tuple[SourceLine, ...]) -> bool:
    """Whether the line that called has more to do with what is returned to it."""
    if index + 1 == len(steps):
        return False
    here, after = steps[index].place, steps[index + 1].place
    lines = (*after.callers, after.source)
    if lines[: len(callers)] != callers:
        return False
    here_parts, after_parts = here.owner.split("."), after.owner.split(".")
    different = next((pair for pair in zip(here_parts, after_parts, strict=False) if pair[0] != pair[1]), None)
    return different is None or not (different[0].isdigit() and different[1].isdigit())  # else a loop's next layer


def _assigned_name(step: DraftOp, assigned: tuple[str, ...], number: int) -> str | None:
    if len(assigned) == len(step.outputs) or (len(assigned) > 1 and number < len(assigned) and len(step.outputs) > 1):
        return assigned[number]
    return assigned[0] if len(assigned) == 1 else None


def _returned_name(steps: Sequence[DraftOp], index: int) -> str:
    """What a module of the user's returns right away goes by its name."""
    here = steps[index].place
    after = steps[index + 1].place if index + 1 < len(steps) else None
    if here.source is None or not here.source.code.startswith("return ") or here.path != here.owner:
        return ""
    ends = after is None or not f"{after.owner}.".startswith(f"{here.owner}.")
    return _module_name(here.owner.partition("@")[0]) if ends and len(steps[index].outputs) == 1 else ""


def _module_name(path: str) -> str:
    """The name of a module, or of the list that it is in; nothing if that is no name."""
    parts = [part for part in path.split(".") if not part.isdigit()]
    name = parts[-1] if parts else ""
    if not name.isidentifier() or keyword.iskeyword(name):
        return ""
    return name if path.endswith(name) else _singular(name)


def _own_name(step: DraftOp, names: Mapping[str, str]) -> str:
    """By the module of torch.nn's that it is in, by what it shows, or by what it does."""
    spec, place = spec_of(step.target), step.place
    module = _module_name(place.module) if place.path != place.owner else ""
    if module:
        return module
    inputs = step.inputs()
    if spec.result == "0" and len(step.outputs) == 1 and inputs and inputs[0] in names:
        return names[inputs[0]]
    return spec.result if spec.result not in (None, "0") else identifier(step.kind)


def _singular(word: str) -> str:
    """What one of a list is called."""
    return word[:-1] if word.endswith("s") and not word.endswith("ss") and len(word) > 3 else word


@lru_cache(maxsize=4096)
def assignment(code: str) -> tuple[str, ...]:
    """The names that a line assigns to: "q, k = f(x)" -> ("q", "k"); () for anything else."""
    match = re.match(r"([A-Za-z_][\w\s,]*?)\s*(?::[^=]*)?(?:[-+*/@|&]?=)(?!=)", code)
    if match is None:
        return ()
    names = tuple(part.strip() for part in match[1].split(",") if part.strip())
    return names if all(name.isidentifier() and not keyword.iskeyword(name) for name in names) else ()


def identifier(text: str) -> str:
    """A python name made of any text."""
    name = re.sub(r"\W+", "_", text).strip("_") or "value"
    name = f"v_{name}" if name[0].isdigit() else name
    return f"{name}_" if keyword.iskeyword(name) else name
