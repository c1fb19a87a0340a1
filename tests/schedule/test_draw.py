"""Pictures of all kinds, letter by letter.

After a wanted change: SHARDWRIGHT_UPDATE=1 pytest tests/schedule/test_draw.py, and look at the diff.
"""

import os
from pathlib import Path

import pytest

from shardwright.schedule import (
    StageTimes,
    draw,
    eager,
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
    spread,
    with_prologue,
    zbv,
    zero_bubble,
)

from .drawn import chain

GOLDEN = Path(__file__).parent / "golden"

PICTURES = {
    "gpipe": lambda: draw(gpipe(4, 6)),
    "1f1b": lambda: draw(one_f_one_b(4, 6)),
    "1f1b-long": lambda: draw(one_f_one_b(4, 100)),
    "eager": lambda: draw(eager(4, 8), edges=chain(4, 1, 1), width=160),
    "interleaved": lambda: draw(interleaved(4, 4)),
    "interleaved-5": lambda: draw(interleaved(3, 5), width=160),
    "interleaved-3-chunks": lambda: draw(interleaved(2, 4, 3), width=160),
    "zb": lambda: draw(zero_bubble(4, 6)),
    "zbv": lambda: draw(zbv(3, 6), width=160),
    "forward": lambda: draw(forward_only(4, 6)),
    "unequal": lambda: draw(
        with_prologue(spread(one_f_one_b(3, 3), [(0,), (1, 2, 3), (4,)]), [2]),
        [StageTimes(1, 2), StageTimes(1.5, 3), StageTimes(1, 2, 0, 1)],
        [(0, 1, 0.5, 0.5), (1, 2, 0.5, 0.5)],
    ),
}


@pytest.mark.parametrize("name", PICTURES)
def test_the_picture_is_the_one_that_was_last_looked_at(name):
    path, text = GOLDEN / f"{name}.txt", PICTURES[name]()
    if os.environ.get("SHARDWRIGHT_UPDATE"):
        path.write_text(text)

    assert text == path.read_text()


def test_every_golden_picture_is_still_drawn():
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(PICTURES)


def test_a_picture_is_no_wider_than_the_terminal():
    for width in (40, 79, 120):
        lines = draw(one_f_one_b(4, 200), width=width).splitlines()[1:]
        assert all(len(line) <= width for line in lines) and all(" ~ " in line for line in lines)


def test_steps_too_short_for_their_label_are_letters():
    text = draw(gpipe(1, 3), [StageTimes(0.1, 1)])

    assert text.splitlines()[1] == "0 |ffff[    0     ][    1     ][    2     ]|"


def test_steps_that_take_no_time_are_not_drawn():
    assert draw(gpipe(1, 2), [StageTimes(0, 0)]).splitlines()[1] == "0 ||"
