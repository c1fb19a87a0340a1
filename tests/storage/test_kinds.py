"""What each kind of storage says about itself, and that plans and files find it by its name."""

from __future__ import annotations

import pytest

from shardwright.errors import LayoutError, PlanError
from shardwright.plan import build_plan, parse_plan_string
from shardwright.plan.file import read
from shardwright.storage import KINDS, SHARDED_KINDS, Replicated, parse_storage, restricted, storage_kind
from shardwright.storage.zero1 import Zero1
from shardwright.storage.zero2 import Zero2
from shardwright.storage.zero3 import Zero3
from tests.plan.graphs import analysis_of, graph_of

SIZES = {"dp": 4, "tp": 2}

STORED = {  # of 12 elements over 4 ranks: parameter, gradient, optimizer state, and how many the optimizer updates
    Replicated: (12, 12, 12, 12),
    Zero1: (12, 12, 3, 3),
    Zero2: (12, 3, 3, 3),
    Zero3: (3, 3, 3, 3),
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_rank_stores_its_share_of_what_is_sharded(kind):
    storage = kind(("dp",)) if kind.sharded() else kind()
    assert tuple(storage.stored(12, storage.parts(SIZES))) == STORED[kind]


SENT = {
    Replicated: ["backward all_reduce dp,tp"],
    Zero1: ["backward all_reduce dp,tp", "update all_gather dp"],
    Zero2: ["backward reduce_scatter dp", "backward all_reduce tp of the share", "update all_gather dp"],
    Zero3: [
        "forward all_gather dp", "backward all_gather dp", "backward reduce_scatter dp",
        "backward all_reduce tp of the share",
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_step_sends_what_brings_shares_together_and_sums_gradients(kind):
    storage = kind(("dp",)) if kind.sharded() else kind()
    sent = list(storage.collectives(("dp", "tp"), trainable=True, backward=True))
    assert [f"{s.phase} {s.collective} {','.join(s.axes)}{' of the share' * s.of_share}" for s in sent] == SENT[kind]
    assert all(s.of_gradient == (s.collective != "all_gather") for s in sent)


def test_what_is_frozen_is_only_gathered_and_evaluation_sums_nothing():
    frozen = list(Zero3(("dp",)).collectives((), trainable=False, backward=True))
    assert [(s.phase, s.collective) for s in frozen] == [("forward", "all_gather"), ("backward", "all_gather")]
    for kind in (Replicated, Zero1, Zero2):
        assert not list(kind(("dp",)).collectives(("dp",), trainable=True, backward=False))


@pytest.mark.parametrize("kind", SHARDED_KINDS, ids=lambda kind: kind.name)
def test_a_kind_is_written_by_its_symbol_and_found_by_it(kind):
    storage = kind(("dp", "tp"))
    assert parse_storage(storage.written()) == storage
    assert storage_kind(kind.symbol) is kind
    assert restricted(storage, {"tp"}) == kind(("tp",))
    assert restricted(storage, ()) == Replicated() == parse_storage({})


def test_kinds_do_not_mix_and_an_unknown_one_is_refused_with_those_there_are():
    with pytest.raises(LayoutError, match="one kind of storage for all axes"):
        parse_storage({"dp": 1, "tp": 3})
    with pytest.raises(LayoutError, match=r"4 is no kind.*1 \(ZeRO-1\), 2 \(ZeRO-2\), 3 \(ZeRO-3\)"):
        parse_storage({"dp": 4})


def test_a_plan_file_with_an_unknown_kind_is_refused_with_the_parameter():
    graph = graph_of("gpt")
    text = build_plan(graph, parse_plan_string("zero3=2"), analysis_of("gpt")).to_json()
    with pytest.raises(PlanError, match=r"(?s)wte\.weight: 7 is no kind of parameter storage"):
        read(text.replace('"dp": 3', '"dp": 7'), graph)


def test_a_plan_that_stores_in_two_ways_at_once_is_refused():
    graph = graph_of("gpt")
    with pytest.raises(PlanError, match="one kind of storage for all axes"):
        build_plan(graph, parse_plan_string("zero1=2,zero3=2"), analysis_of("gpt"))
