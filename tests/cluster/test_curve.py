import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.cluster.curve import Curve, ramp
from shardwright.errors import ClusterError


def test_between_two_points_a_curve_is_straight_on_log_log_paper():
    curve = Curve(((1.0, 1.0), (100.0, 10_000.0)))
    assert curve.at(10) == pytest.approx(100)


def test_beyond_its_ends_a_curve_is_flat():
    curve = Curve(((2.0, 3.0), (4.0, 5.0)))
    assert (curve.at(0.1), curve.at(2), curve.at(4), curve.at(1e9)) == (3, 3, 5, 5)


@given(st.floats(0.01, 1), st.floats(1e3, 1e12), st.floats(1e-2, 1e6), st.floats(1, 10))
def test_a_ramp_grows_and_is_half_at_half(best, half, part, more):
    curve = ramp(best, half)
    assert curve.at(half) == pytest.approx(best / 2, rel=0.02)
    assert curve.at(half * part) <= curve.at(half * part * more) <= best


@pytest.mark.parametrize(
    ("points", "words"),
    [
        ((), "at least one"),
        (((1.0, 1.0), (1.0, 2.0)), "must grow"),
        (((2.0, 1.0), (1.0, 2.0)), "must grow"),
        (((0.0, 1.0),), "positive"),
        (((1.0, -1.0),), "positive"),
        (((1.0, float("inf")),), "positive"),
    ],
)
def test_a_curve_that_is_none_is_refused(points, words):
    with pytest.raises(ClusterError, match=words):
        Curve(points)
