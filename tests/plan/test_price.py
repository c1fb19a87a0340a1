"""What a plan file says of a plan's cost adds up."""

import json
from dataclasses import replace

import pytest

from shardwright.cluster import parse, save
from shardwright.parallelize import plan as make_plan
from tests.models.zoo import ZOO

PLANS = ["dp=4", "dp=2,tp=2", "sp=4", "zero3=2,tp=2", "zero1=2,sp=2", "dp=2,tp=2,recompute", "sp=4,recompute", "auto"]


FLAT = [{"stages": 1}]
"""No pipeline."""


def predicted(plan, **more):
    module, args, kwargs = ZOO["gpt"]()
    more |= {"constraints": FLAT} if plan == "auto" else {}
    return make_plan(module, example=(args, kwargs), plan=plan, cluster="4xA100-80GB", **more).predicted["train"]


def total(prediction, key, *, beside, when=("forward", "backward")):
    return sum(sent[key] for sent in prediction["sent"] if sent["overlapped"] == beside and sent["when"] in when)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("plan", PLANS)
def test_what_is_sent_adds_up_to_the_communication_of_a_step(plan, accumulate):
    prediction = predicted(plan, accumulate=accumulate)

    near = {"rel": 2e-3, "abs": 1e-9}  # numbers in a plan file have four digits
    assert total(prediction, "seconds", beside=False) == pytest.approx(prediction["blocking"], **near)
    assert total(prediction, "seconds", beside=True) == pytest.approx(prediction["overlapped"], **near)
    shows = total(prediction, "seconds", beside=True) - total(prediction, "hidden", beside=True)
    assert shows == pytest.approx(prediction["exposed"], **near)
    parts = prediction["compute"] + prediction["blocking"] + prediction["exposed"] + prediction["update"]
    assert parts == pytest.approx(prediction["seconds"], **near)


def test_kernels_are_slowed_by_collectives_that_share_their_memory(tmp_path):
    """The difference between a cluster of the catalogue and one whose overlap was measured to be nearly the same."""
    catalogue = parse("4xA100-80GB")
    save(replace(catalogue, overlap=catalogue.overlap - 1e-9), tmp_path / "measured.yaml")
    module, args, kwargs = ZOO["gpt"]()
    shared, alone = (
        make_plan(module, example=(args, kwargs), plan="zero3=4", cluster=cluster).predicted["train"]
        for cluster in ("4xA100-80GB", tmp_path / "measured.yaml")
    )
    slowed = shared["compute"] - alone["compute"]
    share = catalogue.memory_share(catalogue.span(range(4)), catalogue.device(0))
    assert 0.2 * share * shared["overlapped"] < slowed <= share * shared["overlapped"]


def test_memory_by_kind_adds_up_to_the_peak():
    memory = predicted("zero3=2,tp=2")["memory"]
    assert sum(size for kind, size in memory.items() if kind != "peak") == pytest.approx(memory["peak"], abs=8)


def test_ops_of_equal_layers_are_said_once_and_the_dearest_first():
    prediction = predicted("dp=2,tp=2")
    names = [op["name"] for op in prediction["ops"]]
    assert len(names) == len(set(names)) == 5
    seconds = [op["seconds"] for op in prediction["ops"]]
    assert seconds == sorted(seconds, reverse=True)
    assert next(op for op in prediction["ops"] if "*" in op["name"])["count"] == 2  # layers of this gpt


def test_axes_say_what_they_split_and_over_which_links():
    dp, tp = predicted("dp=2,tp=2")["axes"]
    assert (dp["axis"], dp["size"], dp["links"], dp["nodes"]) == ("dp", 2, ["nvlink-3"], 1)
    assert dp["batch"] == 1.0
    assert tp["weights"] > 0.9


def test_the_search_says_what_became_of_every_mesh_and_what_it_left_out():
    module, args, kwargs = ZOO["gpt"]()
    plan = make_plan(module, example=(args, kwargs), cluster="8xA100-80GB", constraints=FLAT)
    meshes = plan.predicted["train"]["meshes"]

    assert {mesh["mesh"] for mesh in meshes} == {"8", "4 x 2", "2 x 4"}
    assert [mesh["outcome"] for mesh in meshes].count("chosen") == 1
    best = next(mesh for mesh in meshes if mesh["outcome"] == "chosen")["seconds"]
    assert best == pytest.approx(plan.predicted["train"]["seconds"], rel=1e-3)
    for mesh in meshes:
        if mesh["outcome"] == "slower":
            assert mesh["seconds"] >= best
        if mesh["outcome"] == "bounded":
            assert mesh["bound"] >= best * 0.99
    assert "the search: meshes with three axes were not looked at" in plan.notes


def test_a_plan_file_is_the_same_every_time():
    module, args, kwargs = ZOO["gpt"]()
    texts = {make_plan(module, example=(args, kwargs), cluster="4xA100-80GB").to_json() for _ in range(2)}
    assert len(texts) == 1
    json.loads(texts.pop(), parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))
