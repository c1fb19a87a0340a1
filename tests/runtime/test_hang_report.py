"""Ranks that wait for each other, from what they say: which collective or message is missing, and whose."""

from __future__ import annotations

import copy
import sys
import time
from collections import deque
from unittest import mock

import torch.distributed as dist

from shardwright.runtime.faults import flight_recorder as flight_recorder
from shardwright.runtime.faults.flight_recorder import FlightRecorder
from shardwright.runtime.faults.hang_report import Inquiry, explain


def line(number, text="y = comm.all_reduce(y, self.tp)"):
    return {"at": f"/x/train.py:{number}", "text": text, "source": "model.py:7"}


def entered(number, at, kind="all_reduce", group=("3", [0, 1])):
    return {
        "group": list(group), "number": number, "kind": kind, "what": "a tensor [2]", "backward": False, "at": line(at)
    }  # fmt: skip


def rank_report(*collectives, waiting=True):
    counts = {}
    for collective in collectives:
        counts[str(collective["group"])] = [collective["group"], collective["number"]]
    return {
        "waiting": waiting, "doing": None, "awaits": None, "at": line(1), "counts": list(counts.values()),
        "entered": list(collectives),
    }  # fmt: skip


def test_where_ranks_part_is_said_even_if_their_counts_agree():
    first = rank_report(entered(4, 10), entered(5, 20), entered(6, 30))
    second = rank_report(entered(4, 10), entered(5, 30), entered(6, 40))
    text = explain({0: first, 1: second}, 2, 9)
    assert (
        "they are desynchronized: rank 0 entered all_reduce of a tensor [2] (no. 5 of its group) at /x/train.py:20"
        in text
    )
    assert "but rank 1 entered all_reduce of a tensor [2] (no. 5 of its group) at /x/train.py:30" in text


def test_of_several_groups_that_wait_the_one_is_named_that_waits_for_a_busy_rank():
    other = ["4", [1, 2]]
    message = {
        0: rank_report(entered(1, 10)),
        1: rank_report(entered(7, 50, group=other)),
        2: rank_report(entered(6, 40, group=other), waiting=False),
    }
    text = explain(message, 3, 9)
    assert "no. 7 of its group) at /x/train.py:50" in text
    assert "entered by rank 1, not by rank 2" in text


def test_a_rank_that_gives_no_answer_is_named():
    text = explain({0: rank_report(entered(4, 10))}, 2, 9)
    assert "entered by rank 0, not by rank 1" in text
    assert "rank 1 gave no answer" in text


def test_what_is_none_of_ours_is_said_by_places():
    text = explain({0: rank_report(entered(4, 10)), 1: copy.deepcopy(rank_report(entered(4, 10), waiting=False))}, 2, 9)
    assert "outside of the compiled model" in text
    assert "rank 0 waits at /x/train.py:1" in text and "rank 1 is busy at" in text


def test_a_rank_that_has_run_ahead_of_its_device_asks_too():
    """As on a GPU: nobody waits in a collective, and one rank has not entered what the other has."""
    store = dist.HashStore()
    notes = [FlightRecorder(), FlightRecorder()]
    for journal, count in zip(notes, (3, 2), strict=True):
        for _ in range(count):
            journal.enter("message", (0, 1), None)
        journal.counts = {Group(): count}
        journal.entered = deque(value._replace(group=Group(), kind="all_reduce") for value in journal.entered)
    first, second = (Inquiry(store, rank, 2, journal) for rank, journal in enumerate(notes))
    with mock.patch.object(flight_recorder, "name_of", return_value=["g", [0, 1]]):
        assert first.idle((1, 3), sys._getframe(), 0.05, 5.0) is None
        time.sleep(0.1)
        store.set("ask/0", "0")
        second.answer(None, waiting=False)
        actual = first.idle((1, 3), sys._getframe(), 0.05, 5.0)
        assert "all_reduce (no. 3 of its group)" in actual and "entered by rank 0, not by rank 1" in actual
        assert first.idle((1, 3), sys._getframe(), 0.05, 5.0) is None  # said once
        assert first.idle((1, 4), sys._getframe(), 0.05, 5.0) is None  # it has moved


class Group:
    """Stands for a process group."""

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 0


def stage(number, sent, waiting=True, doing="F0.1"):
    """A pipeline rank that has sent some messages, and waits for one of the other."""
    return {
        "waiting": waiting, "doing": doing, "awaits": ([1 - number, number], 3), "at": line(1), "entered": [],
        "counts": [[["message", [number, 1 - number]], sent]],
    }  # fmt: skip


def test_a_message_that_was_not_sent_is_named_with_who_waits_for_it():
    busy = explain({0: stage(0, 2, waiting=False), 1: stage(1, 9)}, 2, 9)
    assert "rank 1 in step F0.1 waits for message 3 of rank 0, which has sent 2" in busy
    assert "message 3 of rank 0" not in explain({0: stage(0, 3, waiting=False), 1: stage(1, 9)}, 2, 9)
    assert "message 3 of rank 0, which has sent 0" in explain({1: stage(1, 9)}, 2, 9)


def test_of_two_that_wait_for_messages_the_one_is_named_whose_sender_is_busy():
    ring = {0: stage(0, 1, waiting=False), 1: stage(1, 2)}
    assert "rank 1 in step F0.1 waits for message 3 of rank 0, which has sent 1" in explain(ring, 2, 9)
    assert "F0.1, is busy at /x/train.py:1" in explain(ring, 2, 9)


def test_messages_are_no_collectives_that_a_rank_has_not_entered():
    message = {
        rank: {**stage(rank, rank + 3), "awaits": None, "entered": [entered(1, 2, "message")]} for rank in (0, 1)
    }
    assert "outside of the compiled model" in explain(message, 2, 9)


def test_where_a_rank_is_alone_behind_those_before_it_are_named():
    message = {
        0: rank_report(entered(4, 10)),
        1: rank_report(entered(4, 10)),
        2: rank_report(entered(3, 5), waiting=False),
    }
    for part in message.values():
        for collective in part["entered"]:
            collective["group"] = ["5", [0, 1, 2]]
        part["counts"] = [[["5", [0, 1, 2]], part["entered"][0]["number"]]]
    assert "entered by ranks 0, 1, not by rank 2" in explain(message, 3, 9)
