"""Names for sizes: B, S, D for global ones, b, s, d for this rank's share.

An atom gets its letter from what it is in the model (batch, sequence, heads, ...), atoms of
the same kind and size share a name, so that equal layers have equal text. The user's names come first: where `v` is a
value of the model, this rank's share of V over tp is `V_tp`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..lower import LoweredProgram, Size, SizeFactor
from ..rules import Analysis


def kinds(analysis: Analysis) -> dict[int, str]:
    """A letter for every atom that means something."""
    kinds: dict[int, str] = {}

    def mark(dim: tuple[int, ...], letter: str) -> None:
        for atom in analysis.atoms.expand(dim):
            kinds.setdefault(atom, letter)

    mark(analysis.batch_dim, "B")
    by_kind = [(signature.op.target.split(".")[1], signature) for signature in analysis.signatures.values()]
    for kind, signature in by_kind:
        labels = signature.labels
        if "attention" in kind:
            heads = analysis.atoms.expand(labels.get("g", ()))
            mark(heads[:1], "H")
            for label, letter in (("g", "G"), ("r", "G"), ("e", "E"), ("d", "E"), ("s", "S"), ("t", "S")):
                if label in labels:
                    mark(labels[label], letter)
    vocabularies: set[int] = set()
    for kind, signature in by_kind:
        if kind == "embedding":
            rows, positions = signature.labels.get("v", ()), signature.op.inputs[1] in analysis.constants
            mark(rows, "T" if positions else "V")
            vocabularies |= set() if positions else {analysis.atoms.product(rows)}
            mark(signature.labels.get("d", ()), "D")
    for kind, signature in by_kind:
        if "cross_entropy" in kind:
            classes = signature.labels.get("c", ())
            mark(classes, "V" if analysis.atoms.product(classes) in vocabularies else "K")
    for item in analysis.graph.inputs:
        dims = analysis.dims[item.value]
        if len(dims) == 2 and not analysis.graph.values[item.value].floating:
            mark(dims[1], "S")
    for kind, signature in by_kind:
        dims = analysis.dims[signature.op.outputs[0]]
        if "norm" in kind and signature.rule is not None and "batch" not in kind and dims:
            mark(dims[-1], "D")
        if "conv" in kind:
            for label in ("c", "o"):
                mark(signature.labels.get(label, ()), "C")
        if kind in ("linear", "mm") and len(analysis.atoms.expand(signature.labels.get("n", ()))) == 1:
            mark(signature.labels["n"], "M")
    return kinds


class SizeNames:
    """Hands out names as sizes are printed, and remembers them for the head of the file."""

    def __init__(self, program: LoweredProgram, taken: Iterable[str] = (), avoided: Iterable[str] = ()) -> None:
        """`taken` stand for something else in all of the file, `avoided` only in some methods."""
        self.program = program
        self.kinds = kinds(program.analysis)
        self.whole: dict[tuple[str, int], str] = {}
        self.local: dict[tuple[str, int, tuple[str, ...]], str] = {}
        self.uneven: dict[str, SizeFactor] = {}
        self.taken: set[str] = set(taken)  # also by sizes
        self.avoided: frozenset[str] = frozenset(avoided)
        keys = (*(spec.name for spec in program.parameters), *(b.key for b in program.graph.buffers))
        self.parts = {*program.mesh.names, *(key.split(".")[0] for key in keys)}  # what `self.c` is already

    def text(self, size: Size) -> str:
        return " + ".join(self._product(section) for section in size.sections)

    def atom(self, size: Size) -> str:
        """The same, in brackets where it stands in a product."""
        text = self.text(size)
        return f"({text})" if " + " in text else text

    def _product(self, section: tuple[SizeFactor, ...]) -> str:
        """Neighbours of one kind that nothing shards (the two factors of a rotary head) print as one."""
        joined: list[SizeFactor] = []
        for factor in section:
            last = joined[-1] if joined else None
            if last is not None and not last.axes and not factor.axes and self._kind(last) == self._kind(factor):
                joined[-1] = SizeFactor(last.size * factor.size, last.atom)
            elif factor.size != 1:
                joined.append(factor)
        return " * ".join(self._factor(factor) for factor in joined) or "1"

    def _kind(self, factor: SizeFactor) -> str | None:
        return self.kinds.get(factor.atom) if factor.atom is not None else None

    def _factor(self, factor: SizeFactor) -> str:
        if not factor.axes and self._kind(factor) is None:
            return str(factor.size)
        letter = self._kind(factor) or "N"
        total = self._whole_name(letter, factor.size)
        if not factor.axes:
            return total
        key = (letter, factor.size, factor.axes)
        if key not in self.local:
            clash = self._is_taken(total.lower()) or (self._ragged(factor) and total.lower() in self.parts)
            self.local[key] = self._free(f"{total}_{'_'.join(factor.axes)}" if clash else total.lower())
            if self._ragged(factor):
                self.uneven[self.local[key]] = factor
        name = self.local[key]
        return f"self.{name}" if name in self.uneven else name

    def _ragged(self, factor: SizeFactor) -> bool:
        local = factor.size
        for axis in factor.axes:
            parts = self.program.mesh.axis(axis).size
            if local % parts:
                return True
            local //= parts
        return False

    def _whole_name(self, letter: str, size: int) -> str:
        key = (letter, size)
        if key not in self.whole:
            self.whole[key] = self._free(letter)
        return self.whole[key]

    def _free(self, preferred: str) -> str:
        name, number = preferred, 2
        while self._is_taken(name):
            name, number = f"{preferred}{number}", number + 1
        self.taken.add(name)
        return name

    def _is_taken(self, name: str) -> bool:
        return name in self.taken or name in self.avoided

    def definitions(self) -> Iterator[str]:
        """The lines at the head of the file."""
        for (letter, size), name in self.whole.items():
            yield f"{name} = {size}"
            for (kind, total, axes), local in self.local.items():
                if (kind, total) == (letter, size) and local not in self.uneven:
                    rest = size
                    for axis in axes:
                        rest //= self.program.mesh.axis(axis).size
                    yield f"{local} = {rest}  # {name} / {' / '.join(axes)}"

    def ragged_definitions(self) -> Iterator[tuple[str, str]]:
        """Sizes that differ between ranks: the name, and how it is found when the program is loaded."""
        for name, factor in self.uneven.items():
            letter = self.kinds.get(factor.atom, "N") if factor.atom is not None else "N"
            text = self.whole[letter, factor.size]
            for axis in factor.axes:
                text = f"local_size({text}, self.{axis})"
            yield name, text
