"""How long generated code holds on to a value: until its name is bound again, or its method returns.

x = F.linear(y, ...)           a value whose last use is over lives on under its name,
x = F.gelu(x)                  until the name is given to another one (see `emit/names.py`),
x = x.view(...).transpose(1)   unless it has none: it goes with the op that reads it,
return x                       at most until the method of the layer returns
"""

from __future__ import annotations

from .rank_program import RankProgram


def deaths(program: RankProgram) -> list[list[int]]:
    """For each step the tensors that are released after it. What leaves the program is not among them."""
    last = _last_uses(program)
    dying: list[list[int]] = [[] for _ in program.steps]
    outer: dict[str, int] = {}  # name -> tensor, in `forward`
    inner: dict[str, int] = {}  # in the method of a layer
    scope, begin = "", 0

    def bind(names: dict[str, int], number: int, at: int) -> None:
        word, tries = program.tensors[number].word, 1
        while word in names and last[names[word]] > at:
            word, tries = f"{program.tensors[number].word}_{tries}", tries + 1
        if word in names:
            dying[at].append(names[word])
        names[word] = number

    def leave(at: int) -> None:
        """A method returns: its names go, and those of what it read last are bound to what it returns."""
        for word in [word for word, number in outer.items() if begin <= last[number] <= at]:
            dying[at].append(outer.pop(word))
        for number in inner.values():
            if last[number] > at:
                bind(outer, number, at)
            else:
                dying[at].append(number)
        inner.clear()

    for at, step in enumerate(program.steps):
        if step.scope != scope:
            if scope:
                leave(at - 1)
            scope, begin = step.scope, at
        for number in step.outputs:
            if program.tensors[number].fixed:
                continue
            if last[number] == at or not program.tensors[number].word:  # nobody reads it, or the next step alone
                dying[last[number]].append(number)
            else:
                bind(inner if scope else outer, number, at)
    end = len(program.steps) - 1
    for number in (*outer.values(), *inner.values()):
        if last[number] <= end:
            dying[end].append(number)
    return dying


def _last_uses(program: RankProgram) -> dict[int, int]:
    last: dict[int, int] = {}
    for at, step in enumerate(program.steps):
        for number in (*step.outputs, *step.inputs):
            last[number] = at
    last.update(dict.fromkeys(program.outputs, len(program.steps)))
    return last
