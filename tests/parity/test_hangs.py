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
def message(tmp_path_factory):
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
def test_a_rank_that_sleeps_in_an_op(message, case):
    first, waits, sleeps = message[case].splitlines()
    assert re.search(
        r"waited for each other for \d+ s: all_reduce of a tensor \[4, 8\] \(no\. \d+ of its group\)", first
    )
    assert re.search(r"at \S+/train_\w+\.py:\d+ \(\w+ = comm\.all_reduce_\(.*\)\), from failing\.py:", first)
    assert first.endswith("over ranks 0, 1: entered by rank 0, not by rank 1")
    assert waits.startswith("  rank 0 waits at ") and "all_reduce_" in waits
    assert re.match(r"  rank 1 is busy at \S+failing\.py:\d+ \(time\.sleep\(NAP\)\)", sleeps)


def test_a_rank_that_sleeps_in_backward(message):
    first, _, sleeps = message["backward"].splitlines()
    assert "all_reduce of a tensor [4, 8]" in first
    assert re.search(r"in backward of \S+\.py:\d+ \(\w+ = runtime\.replicate_linear\(.*from failing\.py:", first)
    assert "rank 1 is busy" in sleeps


def test_a_rank_that_sleeps_in_the_users_loop(message):
    first, sleeps, waits = message["loop"].splitlines()
    assert "digests of the inputs" in first and "loss = model(x)" in first
    assert "entered by rank 1, not by rank 0" in first
    assert re.match(r"  rank 0 is busy at \S+failing\.py:\d+ \(time\.sleep\(NAP\)\)", sleeps)
    assert "rank 1 waits at" in waits


def test_a_stage_that_sleeps(message):
    first, sleeps, waits = message["pipeline"].splitlines()
    assert re.search(r"rank 1 in step F1\.0 waits for message \d+ of rank 0, which has sent \d+", first)
    assert sleeps.startswith("  rank 0 in step F0.0, is busy at ")
    assert waits.startswith("  rank 1 in step F1.0, waits at ")
