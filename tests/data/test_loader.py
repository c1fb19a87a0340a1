"""Loaders go on where the loop was, whatever their workers have fetched ahead."""

import random
from itertools import chain

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import shardwright as sw
from shardwright.data import Loader, loader
from shardwright.errors import InputError

numbers = st.integers(1, 4)


class Numbers(IterableDataset):
    """A stream of numbers, other ones every epoch."""

    def __init__(self, size):
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for number in range(self.size):
            yield torch.tensor(100 * self.epoch + number)


class Remembering(Numbers):
    """One that knows where it is, and must not be read twice."""

    def __init__(self, size):
        super().__init__(size)
        self.at, self.read = 0, 0

    def __iter__(self):
        while self.at < self.size:
            self.at += 1
            self.read += 1
            yield torch.tensor(100 * self.epoch + self.at - 1)
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def mapped(size):
    return TensorDataset(torch.arange(size))


def rows_of(batch):
    stored = batch[0] if isinstance(batch, list | tuple) else batch
    return stored.tolist()


def run(make, ranks, state=None, stop=None, epochs=2):
    """What all groups see together, batch by batch, and the place where they stopped."""
    groups = [make(rank, ranks) for rank in range(ranks)]
    seen = []
    for group in groups:
        if state is not None:
            group.load_state_dict(state)
        mine = [(epoch, rows_of(batch)) for batch, epoch in walk(group, epochs, stop)]
        seen.append(mine)
    joined = [(parts[0][0], list(chain.from_iterable(part[1] for part in parts))) for parts in zip(*seen, strict=True)]
    states = [group.state_dict() for group in groups]
    assert all(state == states[0] for state in states)
    return joined, states[0]


def walk(batches, epochs, stop):
    count = 0
    if stop == 0:
        return
    for epoch in range(batches.epoch, epochs):
        for batch in batches:
            yield batch, epoch
            count += 1
            if count == stop:
                return


def flat(seen):
    return [(epoch, row) for epoch, rows in seen for row in rows]


KINDS = {
    "map": lambda size, batch: (
        lambda rank, ranks: loader(mapped(size), batch, rank=rank, ranks=ranks, shuffle=True, seed=1)
    ),
    "stream": lambda size, batch: lambda rank, ranks: loader(Numbers(size), batch, rank=rank, ranks=ranks),
    "remembering": lambda size, batch: lambda rank, ranks: loader(Remembering(size), batch, rank=rank, ranks=ranks),
}


@pytest.mark.parametrize("kind", KINDS)
@given(st.integers(1, 30), numbers, numbers, st.integers(0, 12))
@settings(max_examples=40, deadline=None)
def test_a_stop_anywhere_with_any_other_number_of_groups(kind, size, few, many, stop):
    make = KINDS[kind](size, few * many)
    whole, _ = run(make, few)
    first, state = run(make, few, stop=stop)
    rest, _ = run(make, many, state=state)
    assert first + rest == whole
    assert len(flat(whole)) == 2 * size == len(set(flat(whole)) if kind != "map" else flat(whole))


@pytest.mark.parametrize("kind", KINDS)
def test_workers_that_fetch_ahead_change_nothing(kind):
    def make(rank, ranks):
        dataset = {"map": mapped, "stream": Numbers, "remembering": Remembering}[kind](22)
        return loader(dataset, 4, rank=rank, ranks=ranks, workers=2, shuffle=kind == "map", seed=1)

    whole, _ = run(KINDS[kind](22, 4), 1)
    first, state = run(make, 2, stop=2)
    assert state["row"] == 8
    assert first == whole[:2]
    rest, _ = run(make, 1, state=state, epochs=1)
    assert rest == whole[2:6]


def test_a_stream_that_remembers_is_not_read_again():
    _, state = run(KINDS["remembering"](20, 4), 2, stop=3)
    assert state["stream"] == {"ended": False, "dataset": {"at": 12}}
    dataset = Remembering(20)
    batches = loader(dataset, 4)
    batches.load_state_dict(state)
    assert rows_of(next(iter(batches))) == [12, 13, 14, 15]
    assert dataset.read == 4


def test_a_new_epoch_begins_a_stream_anew_also_in_the_middle():
    batches = loader(Remembering(20), 4)
    assert rows_of(next(iter(batches))) == [0, 1, 2, 3]
    batches.set_epoch(1)
    assert rows_of(next(iter(batches))) == [100, 101, 102, 103]


def test_the_last_batch_is_shared_dropped_or_filled_up():
    def make(last, dataset, **options):
        return [list(loader(dataset, 4, rank=rank, ranks=4, last=last, **options))[-1] for rank in range(4)]

    data = TensorDataset(torch.arange(6), torch.arange(6) + 10)
    for dataset in (data, Pairs()):
        assert [batch[0].tolist() for batch in make("keep", dataset)] == [[4], [5], [], []]
        assert [batch[0].tolist() for batch in make("drop", dataset)] == [[0], [1], [2], [3]]
        padded = make("pad", dataset, ignore={1: -100})
        assert [batch[0].tolist() for batch in padded] == [[4], [5], [4], [4]]
        assert [batch[1].tolist() for batch in padded] == [[14], [15], [-100], [-100]]


class Pairs(IterableDataset):
    def __iter__(self):
        for row in range(6):
            yield torch.tensor(row), torch.tensor(row + 10)


def test_rows_that_fill_up_must_be_marked():
    with pytest.raises(InputError, match=r"say how to ignore them, ignore="):
        loader(mapped(5), 2, ranks=2, rank=0, last="pad")
    for ignore, words in (({"labels": -100}, "has no 'labels'"), ({7: 0}, "has no 7")):
        batches = loader(mapped(3), 2, ranks=2, rank=1, last="pad", ignore=ignore)
        with pytest.raises(InputError, match=words):
            list(batches)


def test_batches_of_no_samples_have_the_form_of_others():
    def collate(rows):
        return {"x": torch.stack([row["x"] for row in rows]), "names": [row["name"] for row in rows], "scale": 2.0}

    data = [{"x": torch.ones(3), "name": "a"}]
    (batch,) = loader(data, 2, rank=1, ranks=2, collate=collate)
    assert batch["x"].shape == (0, 3)
    assert batch["names"] == []
    assert batch["scale"] == 2.0


class Noisy(Dataset):
    """Draws from everything that one can draw from."""

    def __len__(self):
        return 10

    def __getitem__(self, row):
        return torch.tensor([row, torch.rand(()).item(), random.random(), numpy.random.rand()], dtype=torch.float64)


def test_what_is_drawn_by_row_is_the_same_after_a_stop_and_with_any_workers():
    def make(ranks=1, rank=0, workers=0):
        return loader(Noisy(), 4, shuffle=True, seed=3, draw_by_row=True, ranks=ranks, rank=rank, workers=workers)

    before = torch.get_rng_state()
    whole = [batch for batch, _ in walk(make(), 2, None)]
    assert torch.equal(torch.get_rng_state(), before)
    assert len({float(x) for batch in whole for x in batch[:, 1:].flatten()}) == 60  # other numbers for every row
    model = make()
    first = [batch for batch, _ in walk(model, 2, 2)]
    groups = [make(2, 0, workers=1), make(2, 1)]
    for group in groups:
        group.load_state_dict(model.state_dict())
    rest = [torch.cat(parts) for parts in zip(*([b for b, _ in walk(g, 2, None)] for g in groups), strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(first + rest, whole, strict=True))
    with pytest.raises(InputError, match="a stream has its own randomness"):
        loader(Numbers(4), 2, draw_by_row=True)


def test_a_sampler_gives_the_order_and_samples_draw_by_index_all_the_same():
    backwards = range(9, -1, -1)
    plain, turned = (loader(Noisy(), 5, seed=3, draw_by_row=True, sampler=order) for order in (None, backwards))
    assert torch.equal(torch.cat(list(turned)), torch.cat(list(plain)).flip(0))
    with pytest.raises(InputError, match="leave out shuffle=True"):
        loader(Noisy(), 5, sampler=backwards, shuffle=True)
    with pytest.raises(InputError, match="a stream has its own order"):
        loader(Numbers(4), 2, sampler=backwards)
    with pytest.raises(InputError, match="needs __len__"):
        loader(Noisy(), 5, sampler=iter(backwards))


# -- any iterable ---------------------------------------------------------------------------------


def test_a_dataloader_of_torch_goes_on_in_the_same_random_order():
    def make():
        return Loader(DataLoader(mapped(9), batch_size=2, shuffle=True), seed=5)

    torch.manual_seed(1)
    whole = [(epoch, rows_of(batch)) for batch, epoch in walk(make(), 2, None)]
    assert sorted(flat(whole[:5])) == [(0, row) for row in range(9)]
    assert [rows for _, rows in whole[:5]] != [rows for _, rows in whole[5:]]
    model = make()
    before = torch.get_rng_state()
    assert [(epoch, rows_of(batch)) for batch, epoch in walk(model, 2, 7)] == whole[:7]
    assert torch.equal(torch.get_rng_state(), before)  # nothing was drawn from the one that a checkpoint has
    other = make()
    other.load_state_dict(model.state_dict())
    assert [(epoch, rows_of(batch)) for batch, epoch in walk(other, 2, None)] == whole[7:]


def test_a_list_of_batches_and_a_sampler_with_epochs():
    stored = Loader([1, 2, 3])
    assert len(stored) == 3
    assert [batch for batch, _ in walk(stored, 2, 4)] == [1, 2, 3, 1]
    other = Loader([1, 2, 3])
    other.load_state_dict(stored.state_dict())
    assert list(other) == [2, 3]
    assert (other.epoch, other.row) == (2, 0)

    class Shifted:
        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            yield from (self.epoch, self.epoch + 10)

    assert list(walk(Loader(Shifted()), 2, None)) == [(0, 0), (10, 0), (1, 1), (11, 1)]


def test_rewinding_and_lengths():
    batches = loader(mapped(10), 4, ranks=2, rank=0)
    assert (len(batches), len(loader(mapped(10), 4, last="drop"))) == (3, 2)
    next(iter(batches))
    assert (batches.row, batches.total) == (4, 4)
    batches.rewind()
    assert len(list(batches)) == 3


def test_what_can_not_be_is_said():
    with pytest.raises(InputError, match="let the stream shuffle itself"):
        loader(Numbers(4), 2, shuffle=True)
    with pytest.raises(InputError, match="don't learn of a new position"):
        loader(Numbers(4), 2, workers=1, persistent_workers=True)
    with pytest.raises(InputError, match="was saved in rows, but this data counts batches"):
        Loader([1]).load_state_dict(loader(mapped(4), 2).state_dict())


# -- with models and checkpoints -------------------------------------------------------------------


def test_a_checkpoint_has_the_place(tmp_path):
    net = torch.nn.Linear(1, 1)
    batches = loader(mapped(10), 2, shuffle=True, seed=9)
    seen = [rows_of(batch) for batch, _ in walk(batches, 1, 2)]
    sw.save(tmp_path / "x", net, data=batches)
    other = loader(mapped(10), 2, shuffle=True)
    other.load_state_dict(sw.load(tmp_path / "x", net).data)
    assert seen + [rows_of(batch) for batch in other] == [
        rows_of(b) for b in loader(mapped(10), 2, shuffle=True, seed=9)
    ]
