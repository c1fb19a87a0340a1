"""The graph's own rules, its text, and its fingerprint."""

from __future__ import annotations

import dataclasses

import pytest

from shardwright.errors import GraphError
from shardwright.ir import Buffer, Graph, Input, Op, Output, Parameter, Slot, SourceLine, Value, check, show


def value(name: str, *shape: int, dtype: str = "float32", gradient: bool = False) -> Value:
    return Value(name=name, shape=shape, dtype=dtype, gradient=gradient)


def little() -> Graph:
    """y = linear(x, w)"""
    values = [
        value("x", 4, 6),
        value("w", 8, 6, gradient=True),
        value("y", 4, 8, gradient=True),
        value("n", dtype="int64"),
    ]
    op = Op(
        name="up / linear", target="aten.linear.default", inputs=("x", "w"), outputs=("y",), module_path="up",
        arguments=(("input", Slot(0)), ("weight", Slot(1))), source=SourceLine(file="/home/me/train.py", line=7),
    )  # fmt: skip
    return Graph(
        name="Net", entry="train", values={value.name: value for value in values}, inputs=(Input(value="x", path="x"),),
        parameters=(Parameter(value="w", keys=("up.weight", "tied.weight")),),
        buffers=(Buffer(value="n", key="count"),), ops=(op,), outputs=(Output(path="", value="y"),), batch=4,
    )  # fmt: skip


def changed(**changes) -> Graph:
    return dataclasses.replace(little(), **changes)


def test_a_sound_graph_is_returned_as_it_is():
    graph = little()

    assert check(graph) is graph


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (
            lambda: changed(inputs=()),
            r"up / linear \(aten.linear.default\) at train.py:7 reads x, which nothing",
        ),
        (lambda: changed(ops=little().ops * 2), "two ops have the name up / linear"),
        (lambda: changed(ops=little().ops * 2), "makes y, which exists already"),
        (lambda: changed(ops=()), "the graph returns y, which nothing makes"),
        (lambda: changed(values={**little().values, "z": value("z", 2)}), r"z float32\[2\] is made by nothing"),
        (lambda: changed(values={**little().values, "n": value("n", dtype="int64", gradient=True)}), "not floating"),
        (lambda: changed(parameters=little().parameters * 2), "parameter w is defined twice"),
        (lambda: changed(values={k: v for k, v in little().values.items() if k != "y"}), "makes y, which has no shape"),
        (
            lambda: changed(ops=(little().ops[0].with_arguments(bias=Slot(5)),)),
            "an argument for its input 5, but only 2 inputs",
        ),
    ],
)
def test_what_breaks_the_rules_is_named(broken, message):
    with pytest.raises(GraphError, match=message):
        check(broken())


def test_all_faults_are_collected_before_one_error_is_raised():
    with pytest.raises(GraphError) as error:
        check(changed(inputs=(), outputs=(Output(path="", value="nothing"),)))

    assert "reads x" in str(error.value)
    assert "returns nothing" in str(error.value)


def test_a_graph_prints_one_op_a_line_with_its_source():
    text = show(little())

    assert "  parameter  w float32[8, 6]  up.weight, tied.weight" in text
    assert "  y float32[4, 8] = aten.linear.default(input=x, weight=w)  # up / linear  train.py:7" in text


def test_the_fingerprint_knows_the_model_and_not_the_batch():
    other_batch = {**little().values, "x": value("x", 8, 6), "y": value("y", 8, 8, gradient=True)}
    wider = {**little().values, "w": value("w", 16, 6, gradient=True)}

    assert changed(values=other_batch, batch=8).fingerprint == little().fingerprint
    assert changed(values=wider).fingerprint != little().fingerprint
    assert (
        changed(ops=(dataclasses.replace(little().ops[0], name="down / linear"),)).fingerprint != little().fingerprint
    )
    assert changed(ops=(dataclasses.replace(little().ops[0], inputs=("w", "x")),)).fingerprint != little().fingerprint


def test_a_graph_can_not_be_changed_in_place():
    with pytest.raises(TypeError):
        little().values["x"] = value("x", 1)  # type: ignore[index]
