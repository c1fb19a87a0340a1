"""Packed documents: what a sequence is, that every token is in one, and that a run resumes anywhere."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from shardwright.data import PackedDocuments, Packing, document_positions, loader
from shardwright.errors import InputError

from .test_loader import run

IGNORED = -100
documents_of_any_length = st.lists(st.integers(1, 25), min_size=1, max_size=30)


def packing(length=8, **options):
    return Packing(**{"length": length, "shift_labels": False, "window": 3, **options})


def numbered(lengths):
    """Documents whose tokens tell the document and the place."""
    return [[100 * number + place + 1 for place in range(length)] for number, length in enumerate(lengths)]


class Documents(IterableDataset):
    """A stream of documents, other ones every epoch."""

    def __init__(self, documents):
        self.documents, self.epoch, self.at = documents, 0, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for document in self.documents:
            yield [token + 10000 * self.epoch for token in document]


class StatefulDocuments(Documents):
    def __iter__(self):
        while self.at < len(self.documents):
            self.at += 1
            yield [token + 10000 * self.epoch for token in self.documents[self.at - 1]]
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def unpacked(sequence):
    """The documents of a sequence, padding as the last one."""
    ids = sequence["document_ids"]
    return [sequence["input_ids"][ids == number].tolist() for number in range(int(ids.max()) + 1)]


def test_a_sequence_has_documents_positions_and_labels_that_start_anew():
    documents = [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10]]
    first, second = PackedDocuments(documents, packing(pad_id=99))
    assert first["input_ids"].tolist() == [1, 2, 3, 6, 7, 8, 9, 10]
    assert first["document_ids"].tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    assert first["position_ids"].tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert first["labels"].tolist() == [IGNORED, 2, 3, IGNORED, 7, 8, 9, 10]
    assert second["input_ids"].tolist() == [4, 5] + [99] * 6
    assert second["document_ids"].tolist() == [0, 0] + [1] * 6
    assert second["position_ids"].tolist() == [0, 1, 0, 1, 2, 3, 4, 5]
    assert second["labels"].tolist() == [IGNORED, 5] + [IGNORED] * 6
    shifted, _ = PackedDocuments(documents, packing(shift_labels=True))
    assert shifted["labels"].tolist() == [2, 3, IGNORED, 7, 8, 9, 10, IGNORED]


def test_labels_of_a_document_mark_what_does_not_count():
    prompt = {"input_ids": torch.arange(1, 6), "labels": torch.tensor([IGNORED, IGNORED, 3, 4, 5])}
    (sequence,) = PackedDocuments([prompt], packing(6))
    assert sequence["labels"].tolist() == [IGNORED, IGNORED, 3, 4, 5, IGNORED]
    (sequence,) = PackedDocuments([prompt], packing(6, shift_labels=True))
    assert sequence["labels"].tolist() == [IGNORED, 3, 4, 5, IGNORED, IGNORED]


@given(documents_of_any_length, st.integers(2, 12), st.integers(1, 4), st.booleans())
@settings(deadline=None)
def test_every_token_that_has_a_label_is_in_one_sequence(lengths, length, window, shuffle):
    documents = numbered(lengths)
    wanted = [tokens[at : at + length] for tokens in documents for at in range(0, len(tokens), length)]
    sequences = list(PackedDocuments(documents, packing(length, window=window), shuffle=shuffle))
    pieces = [piece for sequence in sequences for piece in unpacked(sequence) if any(piece)]
    assert sorted(pieces) == sorted(piece for piece in wanted if len(piece) > 1)
    for sequence in sequences:
        assert {len(values) for values in sequence.values()} == {length}
        assert torch.equal(document_positions(sequence["document_ids"]), sequence["position_ids"])
        assert (sequence["labels"] != IGNORED).any()


@given(documents_of_any_length, st.integers(2, 12))
@settings(deadline=None)
def test_long_documents_may_be_cut(lengths, length):
    documents = numbered(lengths)
    pieces = [p for sequence in PackedDocuments(documents, packing(length, long="cut")) for p in unpacked(sequence)]
    assert sorted(p for p in pieces if any(p)) == [tokens[:length] for tokens in documents if len(tokens) > 1]


def test_documents_that_fit_together_leave_no_padding():
    for sequence in PackedDocuments(numbered([7, 1, 5, 3, 2, 2, 2, 2, 9, 7]), packing(8, window=10)):
        assert sequence["input_ids"].all() or len(unpacked(sequence)) == 2


def test_the_last_sequence_may_be_dropped():
    documents = numbered([8, 8, 3])
    padded, dropped = (list(PackedDocuments(documents, packing(8, remainder=kind))) for kind in ("pad", "drop"))
    assert [sequence["input_ids"].tolist() for sequence in dropped] == documents[:2]
    assert len(padded) == 3
    assert len(list(PackedDocuments(documents[:2], packing(8, remainder="drop")))) == 2


def test_orders_depend_on_the_seed_and_the_epoch_alone():
    documents = numbered([5] * 12)

    def tokens(seed, epoch):
        packed = PackedDocuments(documents, packing(), shuffle=True, seed=seed)
        packed.set_epoch(epoch)
        return tuple(tuple(sequence["input_ids"].tolist()) for sequence in packed)

    orders = [tokens(seed, epoch) for seed in range(3) for epoch in range(3)]
    assert orders == [tokens(seed, epoch) for seed in range(3) for epoch in range(3)]
    assert len(set(orders)) == 9


# -- resuming


KINDS = {
    "map": lambda documents: PackedDocuments(documents, packing(), shuffle=True, seed=1),
    "stream": lambda documents: PackedDocuments(Documents(documents), packing()),
    "stateful": lambda documents: PackedDocuments(StatefulDocuments(documents), packing()),
}


def of_kind(kind, lengths, batch, **options):
    def make(rank, ranks):
        return loader(KINDS[kind](numbered(lengths)), batch, rank=rank, ranks=ranks, collate=tokens_of, **options)

    return make


def tokens_of(sequences):
    return torch.stack([sequence["input_ids"] for sequence in sequences])


@pytest.mark.parametrize("kind", KINDS)
@given(documents_of_any_length, st.integers(1, 3), st.integers(1, 3), st.integers(0, 8))
@settings(max_examples=40, deadline=None)
def test_a_stop_anywhere_on_another_number_of_ranks(kind, lengths, few, many, stop):
    make = of_kind(kind, lengths, few * many)
    whole, _ = run(make, few)
    first, state = run(make, few, stop=stop)
    rest, _ = run(make, many, state=state)
    assert first + rest == whole


@pytest.mark.parametrize("kind", KINDS)
def test_workers_that_fetch_ahead_change_nothing(kind):
    lengths = [5, 9, 2, 30, 4, 4, 7, 3, 8, 8, 1, 6]
    whole, _ = run(of_kind(kind, lengths, 2), 1)
    ahead = of_kind(kind, lengths, 2, workers=2)
    first, state = run(ahead, 2, stop=3)
    rest, _ = run(ahead, 1, state=state)
    assert first + rest == whole


def test_a_stateful_stream_is_not_read_from_the_start():
    class Counting(StatefulDocuments):
        read = 0

        def __iter__(self):
            for document in super().__iter__():
                self.read += 1
                yield document

    documents = numbered([8] * 50)
    packed = PackedDocuments(StatefulDocuments(documents), packing())
    sequences = iter(packed)
    seen = [next(sequences) for _ in range(40)]
    source = Counting(documents)
    again = PackedDocuments(source, packing())
    again.load_state_dict(packed.state_dict())
    rest = list(again)
    assert len(seen) + len(rest) == 50
    assert source.read <= 14  # a window at most is read twice


def test_a_position_in_another_packing_is_refused():
    state = PackedDocuments(numbered([5, 5]), packing(), seed=1).state_dict()
    for other, words in (
        (PackedDocuments(numbered([5, 5]), packing(9), seed=1), "length=8, but here length=9"),
        (PackedDocuments(numbered([5, 5]), packing(), seed=2), "seed=1, but here seed=2"),
        (PackedDocuments(numbered([5]), packing(), seed=1), "size=2, but here size=1"),
    ):
        with pytest.raises(InputError, match=words):
            other.load_state_dict(state)


# -- bad input


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"length": 1}, "length=1: a sequence with a label has at least 2 tokens"),
        ({"long": "wrap"}, "long='wrap': must be one of split, cut"),
        ({"remainder": "keep"}, "remainder='keep': must be one of pad, drop"),
        ({"window": 0}, "window=0"),
        ({"pad_id": 7, "vocab_size": 7}, "pad_id=7 is no token id of a vocabulary of 7"),
        ({"pad_id": -1}, "pad_id=-1 is no token id"),
        ({"vocab_size": 0}, "vocab_size=0"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, words):
    with pytest.raises(InputError, match=words):
        packing(**options)


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([], "document 1 is empty"),
        ([1, 7], "document 1 has the token id 7, which is no token id of a vocabulary of 7"),
        ([1, -1], "document 1 has the token id -1"),
        ([1.0, 2.0], r"document 1 is torch.float32 \[2\]; a document is one row"),
        ([[1, 2]], r"document 1 is torch.int64 \[1, 2\]; a document is one row"),
        ("text", "document 1 is a str, not a row of token ids"),
        ({"ids": [1]}, "document 1 is a dict without input_ids: it has ids"),
        ({"input_ids": [1, 2], "labels": [1]}, "document 1 has 2 tokens and 1 labels"),
        ({"input_ids": [1, 2], "labels": [1, 9]}, "document 1 has the label 9"),
    ],
)
def test_documents_that_are_none_are_named(document, words):
    with pytest.raises(InputError, match=words):
        list(PackedDocuments([[1, 2, 3], document], packing(vocab_size=7)))


def test_a_document_of_a_stream_is_named_by_its_number():
    with pytest.raises(InputError, match="document 2 of the stream is empty"):
        list(PackedDocuments(Documents([[1, 2], [3, 4], []]), packing()))
    with pytest.raises(InputError, match="let the stream shuffle itself"):
        PackedDocuments(Documents([[1, 2]]), packing(), shuffle=True)


def test_document_ids_that_are_not_sorted_are_refused():
    with pytest.raises(InputError, match=r"not sorted: 2 comes before a smaller one at \[1, 2\]"):
        document_positions(torch.tensor([[0, 0, 1, 1], [0, 2, 2, 1]]))
    with pytest.raises(InputError, match="document ids are whole numbers"):
        document_positions(torch.rand(4))
    assert document_positions(torch.tensor([3, 3, 5, 9, 9, 9])).tolist() == [0, 1, 0, 0, 1, 2]
