"""Optimizers of several stages are one in a checkpoint."""

from __future__ import annotations

import pytest

from shardwright.checkpoint.census import Census
from shardwright.checkpoint.optimizers import joined
from shardwright.errors import CheckpointError

from .little import little


def said(state: list[str], *groups: list[str]) -> dict:
    """What a rank says of its optimizer."""
    return {
        "kind": "AdamW",
        "groups": [{"lr": 0.1, "params": names} for names in groups],
        "state": dict.fromkeys(state),
    }


def test_stages_with_other_numbers_of_groups_are_refused():
    census = Census(little()[0])
    for one, other in ((["up.weight"], []), ([], ["up.weight"])):
        with pytest.raises(CheckpointError, match=r"with \d and \d param groups; make the optimizer before"):
            joined([said([], one), said([], other, [])], census)


def test_groups_have_the_parameters_of_all_stages_in_the_order_of_the_model():
    census = Census(little()[0])
    first, second = said(["down.bias"], ["down.bias"], ["down.weight"]), said(["up.bias"], ["up.bias"], [])

    found = joined([first, second], census)

    assert [group["params"] for group in found["groups"]] == [["up.bias", "down.bias"], ["down.weight"]]
    assert found["state"].keys() == {"down.bias", "up.bias"}
    assert first["groups"][0]["params"] == ["down.bias"], "what was said is left as it is"


def test_one_optimizer_keeps_the_order_of_its_own():
    (group,) = joined([said([], ["down.bias", "up.bias"])], Census(little()[0]))["groups"]
    assert group["params"] == ["down.bias", "up.bias"]
