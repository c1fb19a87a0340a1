"""Which inputs have a batch dim, by what is said or by what sizes tell."""

from __future__ import annotations

import pytest

from shardwright.batch_dim import declared_by, find_batch_dim


def reported(shapes):
    batch_dim = find_batch_dim(list(shapes.items()))
    return batch_dim.size, [path for path, has in zip(shapes, batch_dim.batched, strict=True) if has]


@pytest.mark.parametrize(
    ("shapes", "size", "batched"),
    [
        ({"x": (8, 5, 16), "y": (8,)}, 8, ["x", "y"]),
        ({"x": (8, 5, 16), "mask": (5, 5)}, 8, ["x"]),
        ({"mask": (5, 5), "x": (8, 5, 16)}, 8, ["x"]),
        ({"src": (4, 6), "tgt": (4, 7), "src_mask": (6, 6), "tgt_mask": (7, 7)}, 4, ["src", "tgt"]),
        ({"ids": (8, 5), "position": (1, 5)}, 8, ["ids"]),
        ({"x": (8, 4), "y": (8,), "prior": (3,)}, 8, ["x", "y"]),
        ({"x": (8, 3, 4, 4), "scale": (3,), "step": ()}, 8, ["x"]),
        ({"x": (4, 16), "y": (4,), "table": (16, 4)}, 4, ["x", "y"]),
        ({"step": ()}, None, []),
    ],
)
def test_sizes_tell(shapes, size, batched):
    assert reported(shapes) == (size, batched)


@pytest.mark.parametrize(
    "shapes",
    [
        {"images": (8, 12), "texts": (16, 9)},
        {"x": (8, 5, 16), "one": (5, 5), "other": (5, 5)},  # most have 5, and 8 explains it
        {"x": (4, 16), "table": (16, 4)},
    ],
)
def test_sizes_that_do_not_tell_say_why(shapes):
    batch_dim = find_batch_dim(list(shapes.items()))
    assert batch_dim.size is None and not any(batch_dim.batched)
    assert "unbatched=" in batch_dim.why and all(
        f"{path} {list(shape)}" in batch_dim.why for path, shape in shapes.items()
    )


def test_what_is_said_counts_more_than_sizes():
    shapes = {"x": (4, 4, 16), "batch['mask']": (4, 4), "batch['y']": (4,)}
    assert declared_by(["batch['mask']"], shapes) == {"x": True, "batch['mask']": False, "batch['y']": True}
    assert declared_by(["batch"], shapes) == {"x": True, "batch['mask']": False, "batch['y']": False}
    assert declared_by(["bat"], shapes) == dict.fromkeys(shapes, True)
    batch_dim = find_batch_dim(list(shapes.items()), declared_by(["batch['mask']"], shapes))
    assert (batch_dim.size, batch_dim.batched) == (4, (True, False, True))
    assert find_batch_dim([("images", (8,)), ("texts", (16,))], declared_by([], ["images", "texts"])).size is None
