"""Documents packed into sequences of one length, each as if it were alone.

    documents      a b c | d e | f g h i j                  in sequences of 8
    input_ids      a b c f g h i j     d e . . . . . .
    document_ids   0 0 0 1 1 1 1 1     0 0 1 1 1 1 1 1      padding is a document of its own
    position_ids   0 1 2 0 1 2 3 4     0 1 0 1 2 3 4 5
    labels         - b c - g h i j     - e - - - - - -      - is -100; the model shifts them
                   b c - g h i j -     e - - - - - - -      with `shift_labels`: the data has

A label never crosses a border of documents, so the loss of a batch is the mean over all tokens that have one before
them in their document. Attention must not cross borders either: a model makes its mask of `document_ids` or, as
those of transformers, of `position_ids`; capture refuses one that makes it of neither (`capture/masks/documents.py`).

Documents are read in windows of a few sequences; each window is packed best fit, longest first. All ranks and workers
read the same windows, so a position is the document at which a window begins and a number of sequences of it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from ..errors import InputError, raise_all
from .samples import shuffled
from .stream import has_state, is_stream

IGNORED = -100
SHORTEST = 2
"""Tokens of a document that has a label."""

LongDocument = Literal["split", "cut"]
Remainder = Literal["pad", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How documents become sequences.

    length        tokens of a sequence
    shift_labels  False: labels are the tokens themselves, and the model shifts them, as those of transformers do;
                  True: the label of a token is the one after it, for models that don't shift
    long          of a document longer than a sequence: "split" it into documents of that length, or "cut" it
    remainder     of the last sequence of an epoch, if documents don't fill it: "pad" or "drop" it
    window        sequences that are packed at a time
    pad_id        the token that fills sequences up; its label is -100
    vocab_size    to check tokens; None: not known
    """

    length: int
    shift_labels: bool
    long: LongDocument = "split"
    remainder: Remainder = "pad"
    window: int = 64
    pad_id: int = 0
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        faults = []
        if self.length < SHORTEST:
            faults.append(f"length={self.length}: a sequence with a label has at least {SHORTEST} tokens")
        if self.long not in get_args(LongDocument):
            faults.append(f"long={self.long!r}: must be one of {', '.join(get_args(LongDocument))}")
        if self.remainder not in get_args(Remainder):
            faults.append(f"remainder={self.remainder!r}: must be one of {', '.join(get_args(Remainder))}")
        if self.window < 1:
            faults.append(f"window={self.window}: at least one sequence is packed at a time")
        if self.vocab_size is not None and self.vocab_size < 1:
            faults.append(f"vocab_size={self.vocab_size}: must be at least 1")
        elif not self.is_token(self.pad_id):
            faults.append(f"pad_id={self.pad_id} is no token id{self._of_vocabulary()}")
        raise_all(InputError, "documents can't be packed:", faults)

    def is_token(self, token: int) -> bool:
        """Whether a number may be a token id."""
        return token >= 0 and (self.vocab_size is None or token < self.vocab_size)

    def _of_vocabulary(self) -> str:
        return "" if self.vocab_size is None else f" of a vocabulary of {self.vocab_size}"

    def pieces(self, document: Any, name: str) -> list[Piece]:
        """A document as it is packed: parts that fit into a sequence and have a label."""
        ids, labels = self._read(document, name)
        starts = range(0, len(ids), self.length) if self.long == "split" else range(1)
        parts = [slice(start, start + self.length) for start in starts]
        return [Piece(ids=ids[part], labels=labels[part]) for part in parts if len(ids[part]) >= SHORTEST]

    def _read(self, document: Any, name: str) -> tuple[Tensor, Tensor]:
        """Token ids and labels of a document, both as they stand in it."""
        fields = document if isinstance(document, Mapping) else {"input_ids": document}
        if "input_ids" not in fields:
            raise InputError(f"{name} is a dict without input_ids: it has {', '.join(map(str, fields)) or 'nothing'}")
        ids = _whole_numbers(fields["input_ids"], name)
        labels = _whole_numbers(fields["labels"], f"labels of {name}") if "labels" in fields else ids
        if not len(ids):
            raise InputError(f"{name} is empty; leave it out of the data")
        if len(labels) != len(ids):
            raise InputError(f"{name} has {len(ids)} tokens and {len(labels)} labels; each token needs one, or -100")
        for what, numbers in (("token id", ids), ("label", labels[labels != IGNORED])):
            ends = [int(end) for end in numbers.aminmax()] if len(numbers) else []
            wrong = [number for number in ends if not self.is_token(number)]
            if wrong:
                raise InputError(f"{name} has the {what} {wrong[0]}, which is no token id{self._of_vocabulary()}")
        return ids, labels


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A document, or the part of one, that is in one sequence."""

    ids: Tensor
    labels: Tensor


class PackedDocuments(IterableDataset[dict[str, Tensor]]):
    """A stream of sequences, packed of the documents of a dataset, map-style or iterable.

    A document is a list, array or tensor of token ids, or a dict with `input_ids` and maybe `labels`, in which -100
    marks tokens that don't count (a prompt). `shuffle` gives the documents of a map-style dataset a new order every
    epoch, from `seed` and the epoch. A sequence is a dict of `input_ids`, `labels`, `position_ids`, `document_ids`.
    """

    def __init__(self, dataset: Any, packing: Packing, *, shuffle: bool = False, seed: int = 0) -> None:
        self.dataset, self.packing, self.shuffle, self.seed = dataset, packing, shuffle, seed
        self.streamed = is_stream(dataset)
        if shuffle and self.streamed:
            raise InputError("shuffle=True needs a map-style dataset; let the stream shuffle itself")
        self.epoch = 0
        self._documents = 0  # of this epoch, before the current window
        self._source = self._source_state()  # of a stream that has one, there
        self._sequences = 0  # of the current window that were given
        self._first = copy.deepcopy(self._source)

    def set_epoch(self, epoch: int) -> None:
        """Move to the beginning of another epoch; the same epoch continues where it was."""
        if epoch != self.epoch:
            self.epoch, self._documents, self._sequences, self._source = epoch, 0, 0, self._first
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        documents = self._read()
        while True:
            window, count, ended = self._window(documents)
            bins = pack(window, self.packing.length)
            if ended and self.packing.remainder == "drop":
                bins = without_emptiest(bins, self.packing.length)
            for pieces in bins[self._sequences :]:
                self._sequences += 1
                yield sequence_of(pieces, self.packing)
            if ended:
                break
            self._documents, self._source, self._sequences = self._documents + count, self._source_state(), 0
        self._documents, self._sequences, self._source = 0, 0, self._first

    def _window(self, documents: Iterator[tuple[Any, str]]) -> tuple[list[Piece], int, bool]:
        """The next pieces to pack, of how many documents they are, and whether these are the last."""
        pieces: list[Piece] = []
        tokens = count = 0
        while tokens < self.packing.window * self.packing.length:
            document = next(documents, None)
            if document is None:
                return pieces, count, True
            parts = self.packing.pieces(*document)
            pieces += parts
            tokens += sum(len(piece.ids) for piece in parts)
            count += 1
        return pieces, count, False

    def _read(self) -> Iterator[tuple[Any, str]]:
        """The documents from the current window on, each with what it is called in errors."""
        start = self._documents
        if not self.streamed:
            for index in shuffled(len(self.dataset), self.shuffle, self.seed, self.epoch)[start:].tolist():
                yield self.dataset[index], f"document {index}"
            return
        if has_state(self.dataset):
            self.dataset.load_state_dict(copy.deepcopy(self._source))
        for number, document in enumerate(self.dataset, start if has_state(self.dataset) else 0):
            if number >= start:
                yield document, f"document {number} of the stream"

    def _source_state(self) -> Any:
        return copy.deepcopy(self.dataset.state_dict()) if self.streamed and has_state(self.dataset) else None

    def state_dict(self) -> dict[str, Any]:
        """Where `iter` resumes: the same for any number of ranks and workers."""
        place = {"documents": self._documents, "sequences": self._sequences, "source": self._source}
        return {**place, "order": self._order()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a position in the same order of the same documents."""
        faults = [
            f"saved with {key}={state['order'].get(key)!r}, but here {key}={value!r}"
            for key, value in self._order().items()
            if state["order"].get(key) != value
        ]
        raise_all(InputError, "the position in the data belongs to another packing:", faults)
        self._documents, self._sequences = int(state["documents"]), int(state["sequences"])
        self._source = state["source"]

    def _order(self) -> dict[str, Any]:
        """What decides which documents are in which sequence."""
        size = None if self.streamed else len(self.dataset)
        settings = {key: value for key, value in asdict(self.packing).items() if key != "vocab_size"}
        return {"size": size, "shuffle": self.shuffle, "seed": self.seed, **settings}


def pack(pieces: Sequence[Piece], length: int) -> list[list[Piece]]:
    """Pieces in as few sequences as best fit finds, longest first; sequences in the order of their first pieces."""
    bins: list[list[int]] = []
    room: list[int] = []
    for number in sorted(range(len(pieces)), key=lambda number: -len(pieces[number].ids)):
        size = len(pieces[number].ids)
        best = min((at for at, free in enumerate(room) if free >= size), key=room.__getitem__, default=None)
        if best is None:
            bins.append([number])
            room.append(length - size)
        else:
            bins[best].append(number)
            room[best] -= size
    return [[pieces[number] for number in sorted(numbers)] for numbers in sorted(bins, key=min)]


def without_emptiest(bins: list[list[Piece]], length: int) -> list[list[Piece]]:
    """All sequences but the one that has most padding; all of them if none has any."""
    filled = [sum(len(piece.ids) for piece in pieces) for pieces in bins]
    if not bins or min(filled) == length:
        return bins
    emptiest = filled.index(min(filled))
    return bins[:emptiest] + bins[emptiest + 1 :]


def sequence_of(pieces: Iterable[Piece], packing: Packing) -> dict[str, Tensor]:
    """One sequence of these pieces, and padding as a document of its own."""
    ids, labels, sizes = [], [], []
    for piece in pieces:
        border = torch.tensor([IGNORED])
        behind = piece.labels[1:]
        ids.append(piece.ids)
        labels.append(torch.cat([behind, border] if packing.shift_labels else [border, behind]))
        sizes.append(len(piece.ids))
    padding = packing.length - sum(sizes)
    ids.append(torch.full((padding,), packing.pad_id))
    labels.append(torch.full((padding,), IGNORED))
    sizes.append(padding)
    return {
        "input_ids": torch.cat(ids),
        "labels": torch.cat(labels),
        "position_ids": torch.cat([torch.arange(size) for size in sizes]),
        "document_ids": torch.repeat_interleave(torch.tensor(sizes)),
    }


def document_positions(document_ids: Tensor) -> Tensor:
    """The position of each token in its document, of ids [..., tokens] that never come back after another one."""
    if document_ids.dim() < 1 or document_ids.is_floating_point() or document_ids.dtype is torch.bool:
        raise InputError(f"document ids are whole numbers, one for each token; these are {document_ids.dtype} "
                         f"{list(document_ids.shape)}")  # fmt: skip
    steps = document_ids.diff(dim=-1)
    if bool((steps < 0).any()):
        where = (steps < 0).nonzero()[0].tolist()
        raise InputError(
            f"document ids are not sorted: {int(document_ids[tuple(where)])} comes before a smaller one at "
            f"{where}; number the documents of a sequence in their order"
        )
    place = torch.arange(document_ids.shape[-1], device=document_ids.device).expand_as(document_ids)
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[..., 1:] = steps > 0
    return place - torch.where(begins, place, 0).cummax(-1).values


def _whole_numbers(values: Any, name: str) -> Tensor:
    """A row of whole numbers as a tensor of its own."""
    try:
        numbers = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{name} is a {type(values).__name__}, not a row of token ids: {error}") from error
    empty = numbers.dim() == 1 and not len(numbers)  # which torch takes for floats
    if numbers.dim() != 1 or (numbers.is_floating_point() and not empty) or numbers.dtype is torch.bool:
        raise InputError(
            f"{name} is {numbers.dtype} {list(numbers.shape)}; a document is one row of whole numbers, its token ids"
        )
    return numbers.to("cpu", torch.int64)
