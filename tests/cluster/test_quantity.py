import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.cluster.quantity import UNITS, read, write


@pytest.mark.parametrize(
    ("text", "measure", "value"),
    [
        ("80 GiB", "bytes", 80 * 2**30),
        ("80GB", "bytes", 80e9),
        ("300 GB/s", "bytes/s", 300e9),
        ("200 Gb/s", "bytes/s", 25e9),
        ("2.5 us", "seconds", 2.5e-6),
        ("312 TFLOPS", "flops", 312e12),
        ("312e12", "flops", 312e12),
        (7, "bytes", 7.0),
        (" 1.5 ", "number", 1.5),
    ],
)
def test_numbers_are_read_with_their_units(text, measure, value):
    assert read(text, measure) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(
    ("text", "measure"),
    [
        ("80 GiB", "bytes/s"), ("fast", "bytes/s"), ("", "bytes"), (None, "bytes"), (True, "bytes"), ([1], "bytes"),
        ("1.2.3 GB", "bytes"), ("1 s", "number"), (float("nan"), "number"), (float("inf"), "number"),
    ],
)  # fmt: skip
def test_what_is_no_quantity_is_refused(text, measure):
    with pytest.raises(ValueError, match="is not"):
        read(text, measure)


@given(st.floats(1e-12, 1e18), st.sampled_from(list(UNITS)))
def test_what_is_written_is_read_again(value, measure):
    assert read(write(value, measure), measure) == value
