"""Ranks that wait for each other say for what: the op, its line, who has come to it, and where the others are."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from shardwright.errors import RankError

from .failing import NAP, train
from .pool import Pool

PATIENCE = 10.0  # of the process groups
LIMIT = 120.0

CASES = {
    "op": ({"rank": 1, "forward": "sleep"}, "tp=2"),
    "gloo": ({"rank": 1, "forward": "sleep", "shared": 0}, "tp=2"),
    "backward": ({"rank": 1, "backward": "sleep"}, "tp=2"),
    "loop": ({"rank": 0, "loop": "sleep"}, "dp=2"),
    "pipeline": ({"rank": 0, "forward": "sleep"}, "pp=2"),
}


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What the rank says that waits for the one that sleeps; all cases at once, since they only wait."""

    folders = {name: str(tmp_path_factory.mktemp(name)) for name in CASES}
    pools = {name: Pool(2, PATIENCE) for name in CASES}

    def hang(name):
        plan, policy = CASES[name]
        fine, (error, text) = pools[name].try_run(train, plan, policy, folders[name], timeout=NAP + 20)[
            1 - plan["rank"]
        ]
        assert not fine and isinstance(error, RankError), text
        return str(error)

    try:
        for name, (plan, policy) in CASES.items():  # one after the other: none may wait for long while it compiles
            pools[name].run(train, {"shared": plan.get("shared", 1)}, policy, folders[name], timeout=LIMIT)
        with ThreadPoolExecutor(len(CASES)) as threads:
            return dict(zip(CASES, threads.map(hang, CASES), strict=True))
    finally:
        for pool in pools.values():
            pool.close()


@pytest.mark.parametrize("case", ["op", "gloo"])
def test_a_rank_that_sleeps_in_an_op(said, case):
    first, waits, sleeps = said[case].splitlines()
    assert re.search(
        r"waited for each other for \d+ s: all_gather of a tensor \[4, 2\] \(no\. \d+ of its group\)", first
    )
    assert re.search(
        r"at \S+/train_\w+\.py:\d+ \(x = runtime\.gather_linear\(.*\)\), which comes from failing\.py:", first
    )
    assert first.endswith("over ranks 0, 1: entered by rank 0, not by rank 1")
    assert waits.startswith("  rank 0 waits at ") and "gather_linear" in waits
    assert re.match(r"  rank 1 is busy at \S+failing\.py:\d+ \(time\.sleep\(NAP\)\)", sleeps)


def test_a_rank_that_sleeps_in_backward(said):
    first, _, sleeps = said["backward"].splitlines()
    assert "reduce_scatter of a tensor [4, 4]" in first
    assert re.search(r"in backward of \S+\.py:\d+ \(x = runtime\.gather_linear\(.*which comes from failing\.py:", first)
    assert "rank 1 is busy" in sleeps


def test_a_rank_that_sleeps_in_the_users_loop(said):
    first, sleeps, waits = said["loop"].splitlines()
    assert "digests of the inputs" in first and "loss = model(x)" in first
    assert "entered by rank 1, not by rank 0" in first
    assert re.match(r"  rank 0 is busy at \S+failing\.py:\d+ \(time\.sleep\(NAP\)\)", sleeps)
    assert "rank 1 waits at" in waits


def test_a_stage_that_sleeps(said):
    first, sleeps, waits = said["pipeline"].splitlines()
    assert re.search(r"rank 1 in step F1\.0 waits for message \d+ of rank 0, which has sent \d+", first)
    assert sleeps.startswith("  rank 0 in step F0.0, is busy at ")
    assert waits.startswith("  rank 1 in step F1.0, waits at ")


# -- from what ranks say, without processes ---------------------------------------------------------


def line(number, text="y = comm.all_reduce(y, self.tp)"):
    return {"at": f"/x/train.py:{number}", "text": text, "source": "model.py:7"}


def entered(number, at, kind="all_reduce", group=("3", [0, 1])):
    return {
        "group": list(group), "number": number, "kind": kind, "what": "a tensor [2]", "backward": False, "at": line(at)
    }  # fmt: skip


def one(*collectives, waiting=True):
    counts = {}
    for held in collectives:
        counts[str(held["group"])] = [held["group"], held["number"]]
    return {
        "waiting": waiting, "doing": None, "awaits": None, "at": line(1), "counts": list(counts.values()),
        "entered": list(collectives),
    }  # fmt: skip


def test_where_ranks_part_is_said_even_if_their_counts_agree():
    first = one(entered(4, 10), entered(5, 20), entered(6, 30))
    second = one(entered(4, 10), entered(5, 30), entered(6, 40))
    text = explain({0: first, 1: second}, 2, 9)
    assert (
        "they don't do the same: rank 0 entered all_reduce of a tensor [2] (no. 5 of its group) at /x/train.py:20"
        in text
    )
    assert "but rank 1 entered all_reduce of a tensor [2] (no. 5 of its group) at /x/train.py:30" in text


def test_of_several_groups_that_wait_the_one_is_named_that_waits_for_a_busy_rank():
    other = ["4", [1, 2]]
    said = {
        0: one(entered(1, 10)),
        1: one(entered(7, 50, group=other)),
        2: one(entered(6, 40, group=other), waiting=False),
    }
    text = explain(said, 3, 9)
    assert "no. 7 of its group) at /x/train.py:50" in text
    assert "entered by rank 1, not by rank 2" in text


def test_a_rank_that_gives_no_answer_is_named():
    text = explain({0: one(entered(4, 10))}, 2, 9)
    assert "entered by rank 0, not by rank 1" in text
    assert "rank 1 gave no answer" in text


def test_what_is_none_of_ours_is_said_by_places():
    text = explain({0: one(entered(4, 10)), 1: copy.deepcopy(one(entered(4, 10), waiting=False))}, 2, 9)
    assert "in nothing that a compiled model does" in text
    assert "rank 0 waits at /x/train.py:1" in text and "rank 1 is busy at" in text


def test_a_rank_that_has_run_ahead_of_its_device_asks_too():
    """As on a GPU: nobody waits in a collective, and one rank has not entered what the other has."""
    store = dist.HashStore()
    notes = [FlightRecorder(), FlightRecorder()]
    for journal, count in zip(notes, (3, 2), strict=True):
        for _ in range(count):
            journal.enter("message", (0, 1), None)
        journal.counts = {Group(): count}
        journal.entered = deque(held._replace(group=Group(), kind="all_reduce") for held in journal.entered)
    first, second = (Inquiry(store, rank, 2, journal) for rank, journal in enumerate(notes))
    with mock.patch.object(journal_room, "name_of", return_value=["g", [0, 1]]):
        assert first.idle((1, 3), sys._getframe(), 0.05, 5.0) is None
        time.sleep(0.1)
        store.set("ask/0", "0")
        second.answer(None, waiting=False)
        found = first.idle((1, 3), sys._getframe(), 0.05, 5.0)
        assert "all_reduce (no. 3 of its group)" in found and "entered by rank 0, not by rank 1" in found
        assert first.idle((1, 3), sys._getframe(), 0.05, 5.0) is None  # said once
        assert first.idle((1, 4), sys._getframe(), 0.05, 5.0) is None  # it has moved


class Group:
    """Stands for a process group."""

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 0
