"""Why a rank that waits will wait for ever, from what is known at that time."""

from __future__ import annotations

from unittest import mock

import pytest

from shardwright.runtime.faults.heartbeats import Heartbeats
from shardwright.runtime.faults.watch import DOUBT, GRACE, PATIENCE, Watch

LIMIT, BEAT = 100.0, 1.0


def watch(**known) -> mock.Mock:
    """A watch whose other parts answer as is said: nobody has failed, gone or gone silent, and no hang is known."""
    heartbeats = mock.Mock(spec=Heartbeats, interval=BEAT)
    heartbeats.gone.return_value, heartbeats.silent.return_value = known.pop("gone", []), known.pop("silent", [])
    actual = mock.Mock(spec=Watch, _limit=LIMIT, _heartbeats=heartbeats, _ended=mock.Mock())
    answers = {"_reported": None, "_hung": None, "_doubt": None, **known}
    for name, answer in answers.items():
        getattr(actual, name).return_value = answer
    actual._lost.side_effect = lambda ranks: f"lost {ranks}"
    return actual


@pytest.mark.parametrize(
    ("waited", "known", "reason"),
    [
        (GRACE / 2, {"_reported": "rank 1 failed"}, "rank 1 failed"),
        (GRACE / 2, {"gone": [1]}, None),
        (GRACE + 1, {"gone": [1]}, "lost [1]"),
        (DOUBT - 0.5, {"_doubt": "other collectives"}, None),
        (DOUBT + 1, {"_doubt": "other collectives"}, "other collectives"),
        (PATIENCE - 1, {"silent": [2]}, None),
        (PATIENCE + 1, {"silent": [2]}, "lost [2]"),
        (LIMIT, {"_hung": "they wait"}, None),
        (LIMIT + GRACE + 1, {"_hung": "they wait"}, "they wait"),
        (LIMIT + GRACE + 1, {}, None),
    ],
)
def test_a_reason_is_given_when_it_is_sure(waited, known, reason):
    assert Watch._reason(watch(**known), waited, {}) == reason


@pytest.mark.parametrize(
    ("waited", "known", "asks"),
    [(LIMIT / 2, {}, False), (LIMIT - 3 * BEAT, {}, True), (LIMIT - 3 * BEAT, {"_hung": "known"}, False)],
)
def test_others_are_asked_shortly_before_the_backend_gives_up_and_once(waited, known, asks):
    stored = watch(**known)
    Watch._reason(stored, waited, {})
    assert stored._inquire.called == asks


class Stopped(Exception):
    pass


def outlived(places):
    """What a watch without a store does while the main thread is at these places, one a second."""
    left = iter(places)
    stored = watch()
    stored._ended.wait.side_effect = lambda seconds: False
    stored._waiting.side_effect = lambda: next(left)
    stored._stop.side_effect = Stopped
    with (
        mock.patch("shardwright.runtime.faults.watch.time.monotonic", side_effect=map(float, range(10_000))),
        mock.patch("shardwright.runtime.faults.watch.dist.is_initialized", return_value=True),
    ):
        Watch._outlive_store(stored, "the store does not answer")


def test_a_wait_without_a_store_ends_after_the_timeout():
    with pytest.raises(Stopped):
        outlived(["gather"] * int(LIMIT + GRACE + 3))


@pytest.mark.parametrize("places", [["gather"] * int(LIMIT), ["gather", None] * 200, ["gather", "scatter"] * 200])
def test_who_does_not_wait_for_that_long_goes_on_without_a_store(places):
    with pytest.raises(StopIteration):
        outlived(places)
