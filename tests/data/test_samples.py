"""Every row once an epoch, in one order for any number of groups, from any place."""

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.data import ReplicaBatchSampler, share_of_samples
from shardwright.errors import InputError

numbers = st.integers(1, 5)


@st.composite
def shared(draw):
    """A size, a number of groups, and a batch that these can share."""
    ranks = draw(numbers)
    return {"size": draw(st.integers(0, 60)), "batch": ranks * draw(numbers), "ranks": ranks}


def joined(lists):
    return list(chain.from_iterable(lists))


def batches(*, ranks, epoch=0, start=0, **options):
    """The global batches: what the groups have, joined."""
    values = [ReplicaBatchSampler(rank=rank, ranks=ranks, **options) for rank in range(ranks)]
    for rows in values:
        rows.set_epoch(epoch)
        rows.start = start
    return [joined(parts) for parts in zip(*values, strict=True)]


@given(shared(), st.booleans(), st.integers(0, 3), st.integers(0, 9))
def test_every_row_once_an_epoch(setting, shuffle, epoch, seed):
    actual = joined(batches(**setting, shuffle=shuffle, epoch=epoch, seed=seed))
    assert sorted(actual) == list(range(setting["size"]))


@given(st.integers(0, 60), numbers, numbers, numbers, st.integers(0, 3))
def test_the_same_global_batches_for_any_number_of_groups(size, few, many, times, epoch):
    batch = few * many * times
    options = {"size": size, "batch": batch, "shuffle": True, "seed": 3, "epoch": epoch}
    assert batches(**options, ranks=few) == batches(**options, ranks=many)


@given(shared(), numbers, numbers, st.data())
def test_from_any_place_with_any_other_number_of_groups_comes_the_rest(setting, ranks, times, data):
    whole = joined(batches(**setting, shuffle=True, epoch=2))
    place = data.draw(st.integers(0, setting["size"]))
    rest = batches(size=setting["size"], ranks=ranks, batch=ranks * times, shuffle=True, epoch=2, start=place)
    assert joined(rest) == whole[place:]


@given(shared(), st.integers(0, 2))
def test_dropped_and_padded_last_batches(setting, epoch):
    kept = batches(**setting, shuffle=True, epoch=epoch)
    dropped = batches(**setting, shuffle=True, epoch=epoch, last="drop")
    assert dropped == [batch for batch in kept if len(batch) == setting["batch"]]
    groups = [ReplicaBatchSampler(**setting, rank=rank, shuffle=True, last="pad") for rank in range(setting["ranks"])]
    for rows in groups:
        rows.set_epoch(epoch)
    for whole, *shares in zip(kept, *groups, strict=True):
        assert len({len(mine) for mine in shares}) == 1  # as many on every group
        real = [mine[: len(mine) - rows.sharing.padding(len(whole))] for rows, mine in zip(groups, shares, strict=True)]
        assert joined(real) == whole
        assert set(joined(shares)) == set(whole)  # what fills up is of the same batch


@given(shared(), st.sampled_from(["keep", "drop", "pad", "whole"]))
def test_the_length_is_the_number_of_batches(setting, last):
    rows = ReplicaBatchSampler(**setting, last=last)
    assert len(rows) == len(list(rows))


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [tuple(joined(batches(size=40, batch=8, ranks=2, shuffle=True, seed=s, epoch=e)))
              for s in range(3) for e in range(3)]  # fmt: skip
    assert len(set(orders)) == 9
    assert joined(batches(size=10, batch=4, ranks=2, epoch=5)) == list(range(10))


@given(st.integers(0, 40), numbers)
@settings(max_examples=50)
def test_shares_are_those_of_torch_chunk(total, ranks):
    torch = pytest.importorskip("torch")
    chunks = [chunk.tolist() for chunk in torch.arange(total).chunk(ranks)] if total else []
    assert [list(share_of_samples(total, rank, ranks)) for rank in range(ranks)] == chunks + [[]] * (
        ranks - len(chunks)
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch": 6, "ranks": 4}, "batch=6 does not divide by the 4 replicas that share it; use 8"),
        ({"batch": 4, "ranks": 2, "rank": 2}, "rank=2 of ranks=2"),
        ({"batch": 0}, "at least one sample"),
        ({"batch": 2, "last": "kept"}, "must be one of keep, drop, pad, whole"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(options, words):
    with pytest.raises(InputError, match=words):
        ReplicaBatchSampler(10, **options)


def test_a_place_in_another_order_is_refused():
    state = ReplicaBatchSampler(10, 2, shuffle=True, seed=4).state_dict()
    with pytest.raises(InputError, match=r"size=10, but here size=11"):
        ReplicaBatchSampler(11, 2, shuffle=True).load_state_dict(state)
    with pytest.raises(InputError, match=r"shuffle=True, but here shuffle=False"):
        ReplicaBatchSampler(10, 2).load_state_dict(state)
    other = ReplicaBatchSampler(10, 2, shuffle=True, seed=5)
    other.load_state_dict(state)
    assert list(other) == list(ReplicaBatchSampler(10, 2, shuffle=True, seed=4))


@given(shared())
def test_what_can_not_be_shared_evenly_goes_to_every_replica(setting):
    kept = batches(**setting)
    for rank in range(setting["ranks"]):
        for whole, mine in zip(kept, ReplicaBatchSampler(**setting, rank=rank, last="whole"), strict=True):
            size = len(whole) // setting["ranks"]
            assert mine == (whole if len(whole) % setting["ranks"] else whole[rank * size : (rank + 1) * size])
