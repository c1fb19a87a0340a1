"""The result of a rehearsal, printable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..errors import ParityError, raise_all
from ..lower import LoweredProgram
from ..verify import Report
from ..verify.measure import render
from .layers import KeptLayers

Collectives = dict[tuple[str, str], int]
"""Number of reshards in a program, by kind and axes."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Rehearsal:
    """A plan that was run at small sizes in one process. True if it matches one device.

    meshes         of each kind of stage, in the plan and in the rehearsal
    layers         which layers were kept
    sizes          for each real size the small one; unchanged ones are in `kept`
    collectives    the reshards in the programs that ran, by kind and axes
    changed        where the small program differs from the real one: empty for a faithful rehearsal
    report         the comparison, tensor by tensor
    """

    title: str
    meshes: tuple[tuple[str, str], ...]
    devices: tuple[int, int]
    microbatches: tuple[int, int]
    schedule: str
    layers: tuple[KeptLayers, ...]
    sizes: tuple[tuple[int, int], ...]
    kept: tuple[str, ...]
    collectives: Collectives
    changed: tuple[str, ...]
    report: Report
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return self.report.passed and not self.changed

    def __bool__(self) -> bool:
        return self.passed

    def raise_on_failure(self) -> Rehearsal:
        """This rehearsal, or a ParityError that lists what differs."""
        self.report.raise_on_failure()
        raise_all(ParityError, f"{self.title}: the rehearsed program is not that of the plan;", self.changed)
        return self

    def __rich__(self) -> Group:
        table = Table("", "the plan", "the rehearsal", title=self.title, title_justify="left")
        table.add_row("devices", *map(str, self.devices))
        for real, small in self.meshes:
            table.add_row("mesh", real, small)
        if self.schedule:
            table.add_row("schedule", *(f"{self.schedule}, {count} microbatches" for count in self.microbatches))
        for layers in self.layers:
            table.add_row("layers", f"{layers.total} of {layers.path or 'the model'}", ", ".join(map(str, layers.kept)))
        shown = [f"{real} -> {small}" for real, small in self.sizes if real != small]
        table.add_row("sizes", str(len(self.sizes)), ", ".join(shown))
        for note in self.kept:
            table.add_row("sizes kept as is", note, "")
        moves = ", ".join(f"{kind} over {axes} x {count}" for (kind, axes), count in sorted(self.collectives.items()))
        table.add_row("reshards", "", moves or "none")
        lines = [Text(f"differs from the plan: {line}", style="red") for line in self.changed]
        return Group(table, *lines, self.report, Text(f"{self.seconds:.1f} s"))

    def __str__(self) -> str:
        return render(self)

    __repr__ = __str__  # what a prompt shows


def collectives_of(programs: Iterable[LoweredProgram]) -> Collectives:
    """The reshards in programs, by kind and axes."""
    counts: Counter[tuple[str, str]] = Counter()
    for program in programs:
        for op in program.body:
            if op.target.startswith("comm."):
                counts[op.target.removeprefix("comm."), " x ".join(op.argument("axes"))] += 1
    return dict(counts)


def structure_of(program: LoweredProgram) -> list[str]:
    """The structure of a program without sizes: its ops and reshards, in order."""
    lines = []
    for op in program.body:
        axes = op.argument("axes") if op.target.startswith("comm.") else ()
        lines.append(f"{op.name} {op.target} {' '.join(axes)} {op.region or ''}".strip())
    return lines


def differences(real: Sequence[LoweredProgram], small: Sequence[LoweredProgram]) -> list[str]:
    """The first difference of each pair of programs."""
    lines = []
    for number, pair in enumerate(zip(real, small, strict=True)):
        a, b = map(structure_of, pair)
        if a == b:
            continue
        at = next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        where = f"stage {number}: " if len(real) > 1 else ""
        mine, theirs = (program[at] if at < len(program) else "the end" for program in (a, b))
        lines.append(f"{where}the program of the plan has {mine!r} where the small one has {theirs!r}")
    return lines
