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
    actual = mock.Mock(spec=Watch, _limit=LIMIT, _heartbeats=heartbeats)
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
