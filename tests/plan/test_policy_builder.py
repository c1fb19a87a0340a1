"""The policy API: what verbs make of a plan, what is left to the search, and what is refused, with the line."""

from __future__ import annotations

import pytest

import shardwright as sw
from shardwright.cluster import find
from shardwright.errors import InputError, PlanError
from shardwright.plan.request import AutoPlan, PlanRequest, is_policy, read_source
from shardwright.planning import continue_plan
from shardwright.policy import PolicyBuilder, repeated, select
from tests.models.zoo import ZOO
from tests.plan.graphs import analysis_of, graph_of

GRAPH = graph_of("gpt")


def builder(**axes):
    return PolicyBuilder(GRAPH, find("cpu:4"), **axes)


def choices(plan):
    return plan.choices("train")


def planned(plan, cluster=4, **options):
    case = ZOO["gpt"]()
    return sw.plan(case.module, example=(case.args, case.kwargs), plan=plan, cluster=cluster, **options)


def verified(plan, size, **options):
    case = ZOO["gpt"]()
    return sw.verify(case.module, plan, example=(case.args, case.kwargs), ranks=size, steps=1, **options).passed


# -- selection and splits --------------------------------------------------------------


def test_a_module_is_split_and_what_reads_it_follows():
    plan = builder(tp=2)
    plan.split("blocks.*.up", "n", over="tp")
    built = choices(plan.build())
    assert [built[f"blocks.0{name}"]["tp"] for name in (".up / linear", ".up / bias", " / gelu", ".down / linear")] == [
        "n", "c", "c", "k"
    ]  # fmt: skip
    assert "head / linear" not in built


@pytest.mark.parametrize(
    ("target", "dim"),
    [
        ("blocks.0.up", "n"),
        ("blocks.0.up / linear", "n"),
        ("blocks.0.up.weight", 0),
        (select("blocks.0", op="linear", parameter="*.*.up.weight"), -2),
        (select(type="Linear", module="blocks.0.up"), "n"),
        (["blocks.0.up / linear", "blocks.0.up / bias"], "n"),
    ],
)
def test_one_op_has_many_names(target, dim):
    plan = builder(tp=2)
    plan.split(target, dim, over="tp")
    assert choices(plan.build())["blocks.0.up / linear"] == {"tp": "n"}


def test_an_op_is_named_by_its_line():
    line = str(GRAPH.by_name["blocks.0 / gelu"].source)
    plan = builder(tp=2)
    plan.split(line, -1, over="tp")
    assert choices(plan.build())["blocks.1 / gelu"]["tp"] == "c"


def test_the_last_word_counts():
    plan = builder(tp=2)
    plan.split("blocks.*.up", "n", over="tp")
    plan.split("blocks.0.up", "k", over="tp")
    plan.replicate("blocks.1.up", over="tp")
    plan.recompute("blocks.*")
    plan.recompute("blocks.1", False)
    plan.store("blocks.0.up", "zero3", over="tp")
    plan.store("blocks.0.up.weight", "replicated")
    built = plan.build()
    assert choices(built)["blocks.0.up / linear"]["tp"] == "k"
    assert "blocks.1.up / linear" not in choices(built)
    assert built.stages[0].recompute == ("blocks.0",)
    assert not built.storage["blocks.0.up.weight"].axes and built.storage["blocks.0.up.bias"].axes == ("tp",)


def test_an_axis_of_one_device_does_nothing():
    plan = builder(dp=1, tp=2)
    plan.split(dim="batch", over="dp")
    plan.split("blocks.*.up", "n", over="tp")
    assert str(plan.build().mesh) == "tp=2"


def test_what_is_tied_is_split_alike():
    plan = builder(tp=2)
    plan.tie("blocks.*")
    plan.split("blocks.0.up", "n", over="tp")
    assert choices(plan.build())["blocks.1.up / linear"] == {"tp": "n"}


def test_ways_lists_labels_with_the_line_of_the_model():
    (line,) = builder(tp=2).ways("blocks.0.up / linear").splitlines()
    assert "transformer.py:" in line and line.endswith("ma (4), mb (12), k (32), n (128)")


def test_storage_along_an_axis_that_sums_nothing_is_noted():
    plan = builder(tp=2)
    plan.store("ln", "zero1", over="tp")
    assert "ln.weight is not stored over tp: its gradient is not summed over that axis" in plan.build().notes


# -- refusals --------------------------------------------------------------------------


def refuse(verb):
    """What a verb is refused with, by itself or when the plan is built."""
    plan = builder(tp=2, dp=2)

    def run():
        verb(plan)
        plan.build()

    with pytest.raises(PlanError) as caught:
        run()
    return str(caught.value)


@pytest.mark.parametrize(
    ("verb", "why"),
    [
        (lambda p: p.split("blocks.*.upp", "n", over="tp"), "the model has no module 'blocks.*.upp'; it has blocks"),
        (lambda p: p.split("blocks.0.up", "rows", over="tp"), "no op there has the label 'rows'; linear has ma, mb"),
        (lambda p: p.split("blocks.0.up", "n"), "say over which axis; the mesh has tp, dp"),
        (lambda p: p.split("blocks.0.up", "n", over="cp"), "there is no axis 'cp'; the mesh has tp, dp"),
        (lambda p: p.split("blocks.0.up", "n", over="tp", parts=2), "an axis has as many parts as devices"),
        (lambda p: p.split("blocks.0", "batch", over="time", parts=2), "in time the whole model is split"),
        (lambda p: p.split("gpt.py:1", "n", over="tp"), "no op of the model is at 'gpt.py:1'; there are ops at"),
        (lambda p: p.store("head", "zero9", over="dp"), "'zero9' is no kind of parameter storage"),
        (lambda p: p.recompute(""), "the whole model, which saves nothing"),
        (lambda p: p.chunk("blocks.0", 2), "no cross_entropy of the model is meant"),
        (lambda p: p.chunk("", 1), "1 is no number of chunks"),
        (lambda p: p.place("blocks.0", devices=[0, 1, 2]), "needs 4 distinct devices"),
        (lambda p: p.schedule("2f2b"), "there is no schedule '2f2b'"),
        (lambda p: p.schedule(["F0.0 X"]), "'X' is no step"),
        (lambda p: p.order("F0.0", "first"), "'first' is no step"),
        (lambda p: p.order("blocks.1 / gelu", "blocks.0 / gelu"), "comes after blocks.0 / gelu"),
        (lambda p: p.schedule("1f1b", microbatches=3), "a batch of 4 does not divide into 3 microbatches"),
    ],
)
def test_a_refusal_names_the_line_and_the_reason(verb, why):
    message = refuse(verb)
    assert why in message and "test_policy_builder.py:" in message


def test_a_refused_split_names_the_line_of_the_model_too():
    plan = PolicyBuilder(graph_of("gpt", batch=6), dp=4)
    plan.split(dim="batch", over="dp")
    with pytest.raises(PlanError, match=r"builder\.py:\d+: split\('', 'batch'.*transformer\.py:\d+: a batch of 6"):
        plan.build()


@pytest.mark.parametrize(
    ("places", "why"),
    [
        ([("blocks.1", 0), ("blocks.0", 1)], "which comes later; place modules in the order"),
        ([("blocks.0", 0), ("blocks.*", 1)], "is placed already by"),
        ([("blocks.0", 0), ("blocks.1", 2)], "devices are numbered from 0 on"),
        ([("blocks.0.up.weight", 0), ("wte", 1)], "which comes later"),
    ],
)
def test_stages_that_cannot_be_are_refused(places, why):
    plan = builder()
    for target, device in places:
        plan.place(target, devices=device)
    with pytest.raises(PlanError, match=why) as caught:
        plan.build()
    assert "test_policy_builder.py:" in str(caught.value)


def test_stages_share_all_devices_or_none():
    plan = builder(tp=2)
    plan.place("blocks.0", devices=[0, 1])
    plan.place("blocks.1", devices=[1, 2])
    with pytest.raises(PlanError, match="stages share all devices and their mesh, or none"):
        plan.build()


def test_a_split_over_an_axis_that_the_stage_does_not_have_is_refused():
    plan = builder()
    plan.place("blocks.0", devices=[0, 1], tp=2)
    plan.place("blocks.1", devices=[2, 3], dp=2)
    plan.split("blocks.*.up", "n", over="tp")
    with pytest.raises(PlanError, match="is in a stage on dp=2, which has no axis 'tp'"):
        plan.build()


@pytest.mark.parametrize(("wrong", "why"), [(lambda: 1 / 0, "ZeroDivisionError"), (lambda: "dp=2", "returned a str")])
def test_a_policy_that_fails_is_named_with_its_line(wrong, why):
    def mine(graph, cluster):
        return wrong()

    with pytest.raises(PlanError, match=rf"the policy .*mine (failed at test_policy_builder\.py:\d+: )?{why}"):
        planned(mine)


# -- parity ----------------------------------------------------------------------------


def stages(graph, cluster):
    plan = PolicyBuilder(graph, cluster)
    plan.place(["wte", "wpe", "blocks.0"], devices=[0, 2], tp=2)
    plan.place("blocks.1", devices=[1, 3], dp=2)
    plan.split("blocks.0.attn.qkv", "n", over="tp")
    plan.split(["blocks.1", "head"], "batch", over="dp")
    plan.store("blocks.1", "zero2", over="dp")
    plan.schedule(["F0.0 F0.1 B0.1 B0.0", "F1.0 F1.1 B1.1 B1.0"], microbatches=2)
    return plan.build()


def test_stages_of_unlike_meshes_with_a_schedule_by_hand():
    assert verified(stages, 4)
    plan = planned(stages)
    assert plan.schedule == "custom" and [stage.mesh.devices for stage in plan.stages] == [(0, 2), (1, 3)]


def virtual(graph, cluster):
    plan = PolicyBuilder(graph, cluster)
    for target, device in (("wte", 0), ("blocks.0", 1), ("blocks.1", 0), ("ln", 1)):
        plan.place(target, devices=device)
    plan.split(dim="batch", over="time", parts=2)
    plan.chunk(chunks=2)
    return plan.build()


def test_devices_with_several_stages():
    assert verified(virtual, 2)


def test_evaluation_follows_a_policy():
    def policy(graph, cluster):
        plan = PolicyBuilder(graph, cluster, tp=2)
        plan.split("blocks.*.up", "n", over="tp")
        return plan.build()

    assert verified(policy, 2, entries=("train", "eval"))


def test_a_smaller_batch_follows_as_far_as_it_divides():
    plan = builder(dp=2, dp2=2)
    plan.split(dim="batch", over="dp")
    plan.split(dim="batch", over="dp2")
    small = analysis_of("gpt", batch=2)
    more = continue_plan(plan.build(), small.graph, small, PlanRequest())
    assert choices(more)["blocks.0.up / linear"] == {"dp": "ma"}


def test_a_plan_is_repeated_over_more_devices(tmp_path):
    assert verified(repeated(virtual, 2), 4)
    case = ZOO["gpt"]()
    sw.plan(case.module, example=(case.args, case.kwargs), plan="zero2=2", cluster=2).save(tmp_path / "unit.json")
    plan = planned(repeated(tmp_path / "unit.json", 2))
    assert str(plan.mesh) == "dp2=2 x dp=2" and plan.storage["ln.weight"].axes == ("dp",)
    with pytest.raises(PlanError, match=r"batch of 4 does not divide into 1 microbatches on 6|does not divide"):
        planned(repeated("dp=2", 3), cluster=6)


# -- partial policies, strings, constraints --------------------------------------------


def test_the_planner_fills_in_what_is_open():
    def partial(graph, cluster):
        plan = PolicyBuilder(graph, cluster, tp=(2, 4), dp=None)
        plan.split("head", "k", over="tp")
        plan.store("blocks.0.up", "zero3", over="dp")
        plan.recompute("blocks.1")
        return plan

    plan = planned(partial)
    assert choices(plan)["head / linear"]["tp"] == "k" and plan.mesh.sizes == {"dp": 2, "tp": 2}
    assert plan.storage["blocks.0.up.weight"].written() == {"dp": 3}
    assert "blocks.1" in plan.stages[0].recompute and plan.predicted["train"]["gap"] >= 0.0
    assert sum("test_policy_builder.py:" in note for note in plan.notes) >= 3
    free = planned("auto")
    assert free.predicted["train"]["seconds"] <= plan.predicted["train"]["seconds"] * 1.01


def test_stages_that_are_placed_are_searched_inside():
    def partial(graph, cluster):
        plan = PolicyBuilder(graph, cluster, tp=2)
        plan.place("blocks.0", devices=[0, 1])
        plan.place("blocks.1", devices=[2, 3])
        plan.schedule("1f1b", microbatches=2)
        return plan

    plan = planned(partial)
    assert [stage.mesh.devices for stage in plan.stages] == [(0, 1), (2, 3)] and plan.microbatches == 2
    assert next(iter(plan.stages[1].choices)).startswith("blocks.1.")


def test_a_contradiction_of_a_partial_policy_names_its_lines():
    def partial(graph, cluster):
        plan = PolicyBuilder(graph, cluster, tp=4)
        plan.tie("blocks.*")
        plan.split("blocks.0.up", "n", over="tp")
        plan.split("blocks.1.up", "k", over="tp")
        return plan

    with pytest.raises(PlanError, match=r"(?s)can't be done.*test_policy_builder\.py:\d+: tie\('blocks"):
        planned(partial)


def test_constraints_override_a_plan_string():
    plan = planned("dp=2,tp=2", constraints=[{"module": "head", "replicated": True, "on": "tp"}, {"zero": {"min": 2}}])
    assert "tp" not in choices(plan)["head / linear"] and plan.storage["blocks.0.up.weight"].written() == {"dp": 2}
    assert choices(plan)["blocks.0.up / linear"]["tp"] == "n"
    assert verified(plan, 4)


@pytest.mark.parametrize(
    ("constraint", "why"),
    [
        ({"axis": "cp"}, "there is no axis 'cp', the mesh is dp=2 x tp=2"),
        ({"axis": "tp", "size": 4}, "tp has 2 devices"),
        ({"axis": "tp", "splits": "batch"}, "is split on"),
        ({"stages": 2}, "the plan has 1 stages, and 2 are asked for"),
        ({"memory": "1KiB"}, "the plan needs .* on a device"),
        ({"split": "n", "module": "head", "on": "cp"}, "there is no axis 'cp' in the mesh"),
    ],
)
def test_a_string_that_can_not_keep_to_a_constraint_is_refused(constraint, why):
    with pytest.raises(PlanError, match=why):
        planned("dp=2,tp=2", constraints=[constraint])


def test_an_existing_plan_is_held_to_constraints():
    plan = planned("tp=2", cluster=2)
    assert planned(plan, cluster=2, constraints=[{"module": "blocks.*.up", "split": True}]).policy == "tp=2"
    with pytest.raises(PlanError, match=r"entry 1: .*blocks.0.up / linear is tp: n in the plan"):
        planned(plan, cluster=2, constraints=[{"op": "blocks.0.up / linear", "split": "k"}])


def test_strings_name_cuts_and_modules_and_narrow_a_search():
    plan = planned("pp=2,cut=blocks.1,recompute=blocks.0", cluster=2)
    assert next(iter(plan.stages[1].choices)).startswith("blocks.1.") and plan.stages[0].recompute == ("blocks.0",)
    assert plan.policy.startswith("pp=2,cut=blocks.1,recompute=blocks.0")
    searched = planned("auto,tp=2,dp=2")
    assert searched.mesh.sizes == {"dp": 2, "tp": 2} and searched.policy == "auto"
    with pytest.raises(PlanError, match="2 stages are asked for, and 0 modules"):
        planned("pp=2,cut=wte", cluster=2)
    with pytest.raises(PlanError, match="beside auto there are dp, tp"):
        planned("auto,cp=2", cluster=2)


def test_ranges_narrow_a_search():
    plan = planned("auto", constraints=[{"axis": "tp", "size": {"min": 4}}, {"microbatches": {"max": 1}}])
    assert plan.mesh.sizes == {"tp": 4} and plan.microbatches == 1
    plan = planned("auto", constraints=[{"stages": {"min": 2, "max": 3}}, {"microbatches": {"min": 2}}])
    assert len(plan.stages) in (2, 3) and plan.microbatches >= 2


def test_a_policy_is_named_by_its_file(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(
        "from shardwright.policy import PolicyBuilder\n\n\n"
        "def halves(graph, cluster):\n"
        "    plan = PolicyBuilder(graph, cluster, tp=cluster.size)\n"
        "    plan.split('blocks.*.up', 'n')\n"
        "    return plan.build()\n"
    )
    source = read_source(f"{path}:halves")
    assert is_policy(source) and not isinstance(source, AutoPlan)
    assert planned(f"{path}:halves", cluster=2).policy == "policy halves"
    with pytest.raises(InputError, match="has no function 'thirds'; it has"):
        read_source(f"{path}:thirds")


