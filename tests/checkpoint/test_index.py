"""Where the chunks of a tensor lie: put together again as they were, and refused where they can't be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from shardwright.checkpoint.index import (
    HF_INDEX,
    HF_SINGLE,
    INDEX,
    Chunk,
    Index,
    IndexEntry,
    find_weights,
    index_of_weights,
    read_index,
    read_into,
)
from shardwright.checkpoint.tensorfile import MappedFiles, Spec
from shardwright.errors import CheckpointError

WHOLE = torch.arange(24, dtype=torch.float32).view(4, 6)


def quarters(folder: Path) -> Index:
    """A tensor in four boxes, which lie in two files in another order, each file after 8 bytes of something else."""
    boxes = [((2, 0), (2, 2), "a"), ((0, 2), (2, 4), "a"), ((0, 0), (2, 2), "b"), ((2, 2), (2, 4), "b")]
    chunks, written = [], {"a": b"-" * 8, "b": b"-" * 8}
    for (row, column), (height, width), file in boxes:
        chunks.append(Chunk((row, column), (height, width), file, len(written[file])))
        written[file] += WHOLE[row : row + height, column : column + width].contiguous().numpy().tobytes()
    for file, content in written.items():
        (folder / file).write_bytes(content)
    entry = IndexEntry(spec=Spec(dtype=torch.float32, shape=(4, 6)), chunks=tuple(chunks))
    return Index(folder=folder, entries={"w": entry})


def test_boxes_are_put_together_where_they_belong(tmp_path):
    assert torch.equal(quarters(tmp_path).full_tensor("w", MappedFiles()), WHOLE)


def test_a_tensor_is_filled_out_of_all_boxes(tmp_path):
    target = torch.zeros(4, 6)
    read_into({"w": target}, quarters(tmp_path))
    assert torch.equal(target, WHOLE)


def test_a_tensor_may_be_looked_up_under_another_key(tmp_path):
    target = torch.zeros(4, 6)
    read_into({"mine": target}, quarters(tmp_path), {"mine": "w"})
    assert torch.equal(target, WHOLE)


def test_an_index_is_read_as_it_was_written(tmp_path):
    index = quarters(tmp_path)
    (tmp_path / INDEX).write_text(index.to_json())
    assert read_index(tmp_path) == index


@pytest.mark.parametrize(
    "boxes",
    [
        [((0,), (3,))],  # one element is in none
        [((0,), (4,)), ((3,), (1,))],  # one element is in two
        [((0,), (2,)), ((3,), (2,))],  # the last one lies outside
        [((-1,), (4,))],
        [((5,), (-1,)), ((0,), (5,))],
        [],
    ],
)
def test_boxes_that_do_not_make_up_the_tensor_are_refused(boxes):
    with pytest.raises(ValueError, match="chunks of"):
        IndexEntry(
            spec=Spec(dtype=torch.float32, shape=(4,)),
            chunks=tuple(Chunk(offsets, sizes, "a", 0) for offsets, sizes in boxes),
        )


@pytest.mark.parametrize(
    "boxes",
    [
        [((0, 0), (2, 3)), ((0, 0), (2, 3))],  # one half twice, the other one never
        [((0, 0), (3, 2)), ((2, 1), (2, 1)), ((0, 2), (4, 1))],  # all but one element
    ],
)
def test_boxes_that_overlap_are_refused_although_their_sizes_add_up(boxes):
    with pytest.raises(ValueError, match="overlap"):
        IndexEntry(
            spec=Spec(dtype=torch.float32, shape=(4, 3)),
            chunks=tuple(Chunk(offsets, sizes, "a", 0) for offsets, sizes in boxes),
        )


def test_empty_boxes_and_boxes_of_any_form_make_up_a_tensor():
    boxes = [((0, 0), (3, 2)), ((3, 0), (1, 2)), ((0, 2), (1, 1)), ((1, 2), (3, 1)), ((0, 0), (0, 3)), ((1, 1), (2, 0))]
    chunks = tuple(Chunk(offsets, sizes, "a", 0) for offsets, sizes in boxes)
    assert IndexEntry(spec=Spec(dtype=torch.float32, shape=(4, 3)), chunks=chunks).chunks == chunks
    assert IndexEntry(spec=Spec(dtype=torch.float32, shape=(0,)), chunks=(Chunk((0,), (0,), "a", 0),) * 2)


@pytest.mark.parametrize(("start", "fine"), [(8, True), (0, True), (9, False), (-1, False)])
def test_a_box_lies_in_its_file(tmp_path, start, fine):
    (tmp_path / "a").write_bytes(b"-" * 24)
    stored = {"dtype": "F32", "shape": [4], "chunks": [[[0], [4], "a", start]]}
    (tmp_path / INDEX).write_text(json.dumps({"tensors": {"w": stored}}))
    if fine:
        assert read_index(tmp_path).files == {"a"}
    else:
        with pytest.raises(CheckpointError, match="truncated" if start > 0 else "start should be"):
            read_index(tmp_path)


def weights(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> Path:
    save_file(tensors, path, metadata)
    return path


def test_the_header_names_keys_that_are_tied_to_one_that_is_there(tmp_path):
    metadata = {"head": "table", "format": "pt", "other": "gone"}
    _, tied = index_of_weights(weights(tmp_path / "w.safetensors", {"table": WHOLE}, metadata))
    assert tied == {"head": "table"}


def test_a_key_that_has_a_tensor_of_its_own_is_not_tied(tmp_path):
    tensors = {"table": WHOLE, "head": WHOLE + 1}
    _, tied = index_of_weights(weights(tmp_path / "w.safetensors", tensors, {"head": "table"}))
    assert tied == {}


def sharded(folder: Path, weight_map: object) -> Path:
    weights(folder / "one.safetensors", {"table": WHOLE}, {})
    weights(folder / "two.safetensors", {"head": WHOLE + 1}, {})
    (folder / HF_INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_a_folder_of_several_files_is_read_by_its_index(tmp_path):
    folder = sharded(tmp_path, {"table": "one.safetensors", "head": "two.safetensors"})
    assert find_weights(folder) == [folder / "one.safetensors", folder / "two.safetensors"]
    index, _ = index_of_weights(folder)
    assert torch.equal(index.full_tensor("head", MappedFiles()), WHOLE + 1)
    assert torch.equal(index.full_tensor("table", MappedFiles()), WHOLE)


def test_a_folder_of_one_file_is_that_file_and_a_folder_without_one_is_refused(tmp_path):
    assert find_weights(tmp_path) is None
    with pytest.raises(CheckpointError, match="has no weights"):
        index_of_weights(tmp_path)
    path = weights(tmp_path / HF_SINGLE, {"table": WHOLE}, {})
    assert find_weights(tmp_path) == find_weights(path) == [path]


@pytest.mark.parametrize(
    ("weight_map", "fault"),
    [
        ({"table": "../one.safetensors"}, "the name of a file in its folder"),
        ({"table": "one.safetensors", "other": "three.safetensors"}, "incomplete: three.safetensors is missing"),
        ([], "weight_map should be an object"),
    ],
)
def test_an_index_that_names_what_is_not_there_is_refused(tmp_path, weight_map, fault):
    with pytest.raises(CheckpointError, match=fault):
        find_weights(sharded(tmp_path, weight_map))


def test_a_tensor_of_another_dtype_is_put_together_in_it(tmp_path):
    index, _ = index_of_weights(weights(tmp_path / "w.safetensors", {"ids": WHOLE.long() + 2**40}, {}))
    assert torch.equal(index.full_tensor("ids", MappedFiles()), WHOLE.long() + 2**40)
