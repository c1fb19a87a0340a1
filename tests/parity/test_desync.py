"""Ranks that do different things: each says which, with the op and the line of every rank, over any transport."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.launched import Ended, launch

from . import desync

LIMIT = 120.0
CASES = {  # what rank 1 does: the plan, and what all ranks say
    "backward": ("dp=2", r"rank 0 entered all_reduce of the gradients of .*\(loss\.backward\(\)\), but rank 1 entered "
                 r"all_gather of digests of the inputs .*desync\.py:\d+ \(loss = model\(x\)\)"),
    "forward": ("tp=2", r"DriftError: the ranks are desynchronized at call 4 of the model: rank 0 has run backward 3 "
                r"times before at \S+desync\.py:\d+ \(loss = model\(x\)\), but rank 1 has run backward 2 times"),
    "evaluation": ("dp=2", r"rank 1 calls the model with .* for the first time .*desync\.py:\d+ \(model\(x\)\)"),
    "state": ("zero3=2", r"rank 0 entered all_gather of digests .*\(loss = model\(x\)\), but rank 1 entered all_gather "
              r"of a whole tensor .*desync\.py:\d+ \(model\.full_state_dict\(\)\)"),
    "norm": ("tp=2", r"rank 0 entered all_gather of digests .*\(loss = model\(x\)\), but rank 1 entered all_reduce "
             r"of norms .*desync\.py:\d+ \(torch\.nn\.utils\.clip_grad_norm_"),
    "save": ("dp=2", r"all_gather of digests .*entered by rank 0, not by rank 1\n.*rank 0 waits at .*\(loss\.backward"
             r"\(\)\)\n.*rank 1 waits at \S+desync\.py:\d+ \(sw\.save\("),
    "plan": ("", r"versions and settings \(\S+desync\.py:\d+ .*\n.*- plan: dp=2 on rank 0, tp=2 on rank 1"),
    "model": ("tp=2", r"programs \(\S+desync\.py:\d+ .*\n.*- graph: Net \w+ on rank 0, Net \w+ on rank 1"),
    "microbatches": ("pp=2", r"settings \(\S+desync\.py:\d+ .*\n.*- pipeline\.microbatches: 2 on rank 0, 4 on rank 1"),
}  # fmt: skip
TRANSPORTS = {"shared memory": 1, "gloo": 0}
SUITE = (
    ("backward", "shared memory"), ("backward", "gloo"), ("state", "shared memory"), ("state", "gloo"),
    ("forward", "gloo"), ("evaluation", "shared memory"), ("norm", "gloo"), ("save", "gloo"), ("plan", "gloo"),
    ("model", "shared memory"), ("microbatches", "gloo"),
)  # fmt: skip
"""The cases that the suite runs."""


def end(case: str, transport: str, folder: Path) -> list[Ended]:
    """How the ranks of a case ended."""
    folder.mkdir()
    script = (desync.train, case, CASES[case][0], TRANSPORTS[transport], str(folder))
    return launch(2, *script, folder=folder, timeout=LIMIT)


def check(case: str, ranks: list[Ended]) -> None:
    """Every rank names what differs, by an error of ours with op and line; where all say the same, one in full."""
    pattern = CASES[case][1]
    assert any(re.search(pattern, rank.text) for rank in ranks), ranks
    for rank in ranks:
        assert rank.code == 1, rank.text[-3000:]
        assert re.search(r"shardwright\.errors\.(RankError|DriftError|InputError): ", rank.text), rank.text[-3000:]
        assert re.search(pattern.split(r"\n")[0], rank.text), rank.text[-3000:]


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> dict[tuple[str, str], list[Ended]]:
    """How the ranks of each case ended; several at once, since most of the time they wait."""
    folder = tmp_path_factory.mktemp("desync")
    first = end(*SUITE[0], folder / "first")  # which also starts the server of processes
    with ThreadPoolExecutor(5) as threads:
        others = threads.map(lambda key: end(*key, folder / "-".join(key)), SUITE[1:])
        return dict(zip(SUITE, [first, *others], strict=True))


@pytest.mark.parametrize(("case", "transport"), SUITE)
def test_every_rank_names_what_differs_with_op_and_line(ended, case, transport):
    check(case, ended[case, transport])


def test_a_backward_that_sends_nothing_is_missed_all_the_same(tmp_path):
    """Under tp the backward of this model has no collective: only the parameters of the ranks would differ."""
    for rank in launch(2, desync.train, "backward", "tp=2", 1, str(tmp_path), folder=tmp_path, timeout=LIMIT):
        assert rank.code == 1, rank.text[-3000:]
        assert "DriftError: the ranks are desynchronized at call 4 of the model: rank 0 has run backward 3" in rank.text
