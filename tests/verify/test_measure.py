"""The measure of parity, and the table that shows it."""

import math

import pytest
import torch

from shardwright.errors import ParityError
from shardwright.verify.measure import Report, Row, compare, deviation, worst_of


def row(kind="gradient", name="w", off=0.0, allowed=1.0):
    return Row(kind=kind, name=name, deviation=off, allowed=allowed)


def test_the_largest_gradient_widens_the_limit():
    mine, original = {"w": torch.tensor([1e-12])}, {"w": torch.tensor([0.0])}

    assert not compare("gradient", mine, original, 0.0, 1e-10)[0].passed
    assert compare("gradient", mine, original, 1.0, 1e-10)[0].passed


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.5], 0.5),
        ([math.inf], [math.inf], 0.0),
        ([math.nan], [math.nan], 0.0),
        ([math.nan], [1.0], math.inf),
        ([math.inf], [1.0], math.inf),
        ([1.0, 1.0], [1.0], math.inf),
        (None, [0.0, 0.0], 0.0),
        (None, [0.0, 1.0], math.inf),
        ([1.0], None, math.inf),
        (None, None, 0.0),
    ],
)
def test_deviation(a, b, expected):
    first, other = (None if value is None else torch.tensor(value) for value in (a, b))
    assert deviation(first, other) == expected


def test_a_tensor_that_only_one_side_has_is_a_row():
    rows = compare("gradient", {"a": torch.ones(1)}, {"b": torch.ones(1)}, 1.0, 1e-10)
    assert {row.name for row in rows if not row.passed} == {"a", "b"}


def test_the_worst_of_all_ranks_stays():
    (actual,) = worst_of([[row(off=0.1)], [row(off=0.3)], [row(off=0.2)]])
    assert actual.deviation == 0.3


def test_a_report_names_its_worst_row_and_raises():
    report = Report(title="net", rows=(row(name="a", off=0.5), row(name="b", off=3.0, allowed=2.0)), tolerance=1e-10)

    assert not report.passed
    assert report.worst.name == "b"
    assert "worst: gradient b, 3.0e+00 off" in str(report)
    with pytest.raises(ParityError, match=r"gradient b: 3\.00e"):
        report.raise_on_failure()


def test_a_report_that_passes_is_true_and_returns_itself():
    report = Report(title="net", rows=(row(),), tolerance=1e-10)
    assert report
    assert report.raise_on_failure() is report


def test_a_report_of_nothing_does_not_pass():
    assert not Report(title="net", rows=(), tolerance=1e-10).passed
