"""What people pass as `plan=`, parsed once."""

from pathlib import Path

import pytest

from shardwright.errors import PlanError
from shardwright.plan import PolicyRequest, build_plan, parse_plan_string
from shardwright.plan.request import AutoPlan, PlanFile, PlanRequest, read_source, source_name, source_size
from tests.plan.graphs import analysis_of, graph_of


def plan():
    return build_plan(graph_of("mlp"), parse_plan_string("tp=2"), analysis_of("mlp"))


def my_policy(graph, cluster):
    return plan()


@pytest.mark.parametrize(
    ("passed", "kind", "size", "name"),
    [
        ("auto", AutoPlan, None, "auto"),
        ("dp=2,tp=2", PolicyRequest, 4, "dp=2,tp=2"),
        ("pp=1+3,dp", PolicyRequest, 4, "pp=1+3,dp"),
        ("single", PolicyRequest, 1, "single"),
        ({"dp": 2, "tp": 2}, PolicyRequest, 4, "dp=2,tp=2"),
        (
            {"pp": 2, "zero3": 2, "schedule": "zb", "recompute": True, "chunked_loss": False},
            PolicyRequest,
            4,
            "pp=2,zero3=2,zb,recompute",
        ),
        (my_policy, type(my_policy), None, "my_policy"),
    ],
)
def test_a_source_has_a_type_a_size_and_a_name(passed, kind, size, name):
    source = read_source(passed)
    assert isinstance(source, kind)
    assert (source_size(source), source_name(source)) == (size, name)


@pytest.mark.parametrize("as_path", [str, Path])
def test_a_file_is_read_when_it_is_needed(tmp_path, as_path):
    path = tmp_path / "plan.json"
    source = read_source(as_path(path))
    assert source == PlanFile(path=path)

    plan().save(path)
    assert source_size(source) == 2
    assert source.load(graph_of("mlp")).policy == "tp=2"


def test_a_plan_is_its_own_source():
    known = plan()
    assert read_source(known) is known
    assert (source_size(known), source_name(known)) == (2, "tp=2")


@pytest.mark.parametrize(
    ("text", "words"), [("nothing", "is not JSON"), ("[]", "should be an object"), ("{}", "mesh is missing")]
)
def test_a_file_that_is_no_plan_is_refused(tmp_path, text, words):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanError, match=rf"plan\.json is not (?s:.*){words.removeprefix('is not ')}"):
        source_size(read_source(tmp_path / "plan.json"))


@pytest.mark.parametrize("passed", [3, None, ["dp=2"]])
def test_anything_else_is_refused_with_what_may_be_passed(passed):
    with pytest.raises(PlanError, match=r'the plan is a \w+; pass "auto", a plan string'):
        read_source(passed)


def test_a_misspelt_string_is_refused_when_it_is_read():
    with pytest.raises(PlanError, match="asks for 'pt'"):
        PlanRequest.read("pt=2")


def test_only_auto_searches():
    assert PlanRequest().searches and not PlanRequest.read("dp=2").searches
