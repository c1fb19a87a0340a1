"""The short way to say a plan, and what is said back when it makes no sense."""

from __future__ import annotations

import pytest

from shardwright.errors import PlanError
from shardwright.plan import read_request


@pytest.mark.parametrize(
    ("text", "mesh"),
    [
        ("dp=2", "dp=2"),
        ("tp=2,dp=4", "dp=4 x tp=2"),
        (" sp = 2 ", "tp=2"),
        ("zero3=2,tp=2", "dp=2 x tp=2"),
        ("dp=2,zero1=4", "dp=2 x zero1=4"),
        ("single", "one device"),
        ("", "one device"),
    ],
)
def test_replicas_stand_outside_and_tensor_parallelism_between_neighbours(text, mesh):
    assert str(read_request(text).mesh) == mesh


def test_a_request_prints_as_it_can_be_read():
    request = read_request("tp=2,zero3=4")

    assert read_request(str(request)) == request


@pytest.mark.parametrize(
    ("text", "why", "remedy"),
    [
        ("pq=2", "asks for 'pq'", "as in 'dp=2,tp=2'"),
        ("dp", "does not say how many devices dp has", "write dp=2"),
        ("dp=two", "does not say how many devices dp has", "write dp=2"),
        ("dp=-2", "does not say how many devices dp has", "write dp=2"),
        ("dp=1", "gives dp 1 device", "leave an axis out"),
        ("tp=0", "gives tp 0 device", "leave an axis out"),
        ("dp=2,dp=2", "names dp twice", ""),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused_with_its_text_and_a_remedy(text, why, remedy):
    with pytest.raises(PlanError) as error:
        read_request(text)

    assert repr(text) in str(error.value)
    assert why in str(error.value)
    assert remedy in str(error.value)


def test_a_plan_for_another_number_of_processes_names_both_and_says_how_to_start_them():
    with pytest.raises(PlanError, match=r"for 4 devices, but there are 3 processes; start 4 .*--nproc-per-node=4"):
        read_request("dp=2,tp=2", world=3)
