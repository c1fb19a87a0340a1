"""A rank that raises or is killed: the others stop soon, and say whose fault it was."""

import time

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.errors import RankError
from shardwright.runtime.faults import watch
from tests.launched import launch

from . import failing
from .failing import train

SOON = 30.0  # seconds from the failure to the end of all, on a busy machine
LIMIT = 150.0  # with start-up


def fail(pool, plan, policy, tmp_path, shared=1):
    """Every rank's (error, text), of a training in which one rank fails; by gloo alone if memory is not shared."""
    plan = {**plan, "shared": shared}
    if not shared:
        pool.close()  # groups that have begun go on as they have agreed to
    pool.run(train, {"shared": shared}, policy, str(tmp_path), timeout=LIMIT)  # compiled, and nobody says anything
    start = time.monotonic()
    answers = pool.try_run(train, plan, policy, str(tmp_path), timeout=LIMIT)
    assert time.monotonic() - start < SOON
    assert not any(fine for fine, _ in answers)
    return [answer for _, answer in answers]


@pytest.mark.parametrize(
    ("when", "policy", "shared"),
    [("forward", "dp=2", 1), ("forward", "tp=2", 1), ("backward", "dp=2", 1), ("forward", "tp=2", 0)],
)
def test_the_others_stop_with_the_error_of_the_rank_that_raised(pools, tmp_path, when, policy, shared):
    failed, other = fail(pools[2], {"rank": 0, when: "raise"}, policy, tmp_path, shared)
    assert isinstance(failed[0], ValueError)
    assert isinstance(other[0], RankError)
    assert f"rank 0 raised ValueError: the data went bad in {when}, at " in str(other[0])
    assert "failing.py:" in str(other[0])


@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stage_that_raises_stops_the_other(pools, tmp_path, when, rank):
    answers = fail(pools[2], {"rank": rank, when: "raise"}, "pp=2", tmp_path)
    failed, other = answers[rank], answers[1 - rank]
    assert isinstance(failed[0], ValueError)
    assert isinstance(other[0], RankError)
    assert f"rank {rank} raised ValueError: the data went bad in {when}, at " in str(other[0])


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_stage_that_is_killed_stops_all(pools, tmp_path, when):
    answers = fail(pools[4], {"rank": 2, when: "kill"}, "pp=2,dp=2", tmp_path)
    for rank in (0, 1, 3):
        assert isinstance(answers[rank][0], RankError), answers[rank][1]
        assert "rank 2 was lost" in str(answers[rank][0])


@pytest.mark.parametrize(
    ("when", "policy", "shared"),
    [("forward", "tp=2", 1), ("backward", "dp=2", 1), ("backward", "zero3=2", 1), ("backward", "dp=2", 0)],
)
def test_the_others_name_a_rank_that_was_killed(pools, tmp_path, when, policy, shared):
    other, killed = fail(pools[2], {"rank": 1, when: "kill"}, policy, tmp_path, shared)
    assert killed == (None, "rank 1 died without an error")
    assert isinstance(other[0], RankError)
    assert "rank 1 was lost" in str(other[0])


def test_all_of_four_name_the_one_that_was_killed(pools, tmp_path):
    answers = fail(pools[4], {"rank": 2, "backward": "kill"}, "dp=2,tp=2", tmp_path)
    for rank in (0, 1, 3):
        assert isinstance(answers[rank][0], RankError), answers[rank][1]
        assert "rank 2 was lost" in str(answers[rank][0])


def check_ends(other, failed):
    assert other.code == 1
    assert "RankError: rank 1 raised ValueError: the data went bad in forward" in other.text
    assert failed.code == 1
    assert failed.seconds - other.seconds > 3  # it was not the end of the other that told
    assert "ValueError: the data went bad in forward" in failed.text
    assert "RankError" not in failed.text


def test_scripts_of_their_own_end_with_the_error_even_if_the_failed_one_lives_on(tmp_path):
    check_ends(*failing.launch(2, {"rank": 1, "forward": "raise", "stay": 12}, "tp=2", tmp_path, LIMIT))


def test_so_do_stages(tmp_path):
    plan = {"rank": 1, "forward": "raise", "stay": 12}
    check_ends(*launch(2, failing.train, 0, plan, "pp=2", str(tmp_path / "code"), folder=tmp_path, timeout=LIMIT))


SEEN: dict[bool, bool] = {}  # whether the watch sees the thread that runs a forward, while it is traced and else


class Looks(nn.Linear):
    def forward(self, x):
        seen = watch.watch()
        SEEN[torch.compiler.is_exporting()] = seen is not None and seen._frame() is not None
        return super().forward(x).sum()


def looked_at(rank: int, folder: str) -> dict[bool, bool]:
    model = Looks(2, 2)
    model(torch.ones(2, 2))
    sw.parallelize(model, example=(torch.ones(2, 2),), plan="dp=2", compile={"directory": folder})
    return SEEN


def test_nobody_looks_into_a_trace(pools, tmp_path):
    """A frame that another thread holds keeps tensors alive, of which torch then makes copies that no trace knows."""
    for seen in pools[2].run(looked_at, str(tmp_path)):
        assert seen == {False: True, True: False}
