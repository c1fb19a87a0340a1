"""Files of tensors: the safetensors package reads ours, ours are read in parts, and nonsense is refused."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from shardwright.checkpoint.tensorfile import DTYPES, MappedFiles, Spec, TensorWriter, in_order, read_header
from shardwright.errors import CheckpointError

TENSORS = {
    **{name.lower(): torch.arange(24).reshape(2, 3, 4).to(dtype) for name, dtype in DTYPES.items()},
    "number": torch.tensor(3.5),
    "nothing": torch.empty(0, 4),
    "turned": torch.arange(6.0).reshape(2, 3).t(),
}


def write(path, tensors, metadata=None):
    specs = {name: Spec(dtype=tensor.dtype, shape=tuple(tensor.shape)) for name, tensor in tensors.items()}
    with TensorWriter(path, specs, metadata) as writer:
        for name in in_order(specs):
            writer.add(name, tensors[name])
    return writer


def test_the_package_reads_what_is_written(tmp_path):
    write(tmp_path / "x.safetensors", TENSORS, {"format": "pt"})
    tensors = load_file(tmp_path / "x.safetensors")
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor), name
    with safe_open(tmp_path / "x.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_what_the_package_writes_is_read_in_parts(tmp_path):
    kept = {name: tensor.contiguous() for name, tensor in TENSORS.items()}
    save_file(kept, tmp_path / "x.safetensors")
    places, _ = read_header(tmp_path / "x.safetensors")
    mapped = MappedFiles()
    for name, value in kept.items():
        whole = mapped.box(tmp_path / "x.safetensors", places[name], [0] * value.dim(), value.shape)
        assert whole.dtype == value.dtype and torch.equal(whole, value), name
    box = mapped.box(tmp_path / "x.safetensors", places["bf16"], [1, 0, 1], [1, 2, 3])
    assert torch.equal(box, TENSORS["bf16"][1:2, 0:2, 1:4])


def test_the_digest_is_that_of_the_file(tmp_path):
    from shardwright.checkpoint.disk import digest_of

    writer = write(tmp_path / "x.safetensors", TENSORS)
    assert writer.digest == digest_of(tmp_path / "x.safetensors")


def test_what_was_not_to_be_written_is_refused(tmp_path):
    specs = {"a": Spec(dtype=torch.float32, shape=(2,)), "b": Spec(dtype=torch.float32, shape=(2,))}
    with (
        pytest.raises(CheckpointError, match=r"b .* does not belong in this file"),
        TensorWriter(tmp_path / "x", specs) as w,
    ):
        w.add("b", torch.zeros(2))
    with pytest.raises(CheckpointError, match="incomplete: b"), TensorWriter(tmp_path / "y", specs) as w:
        w.add("a", torch.zeros(2))
    with pytest.raises(CheckpointError, match="complex128, which"):
        TensorWriter(tmp_path / "z", {"a": Spec(dtype=torch.complex128, shape=())})


def header(content, data=b""):
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 64,
        (10**7).to_bytes(8, "little") + b"{}",
        header(b"{not json"),
        header([1, 2]),
        header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}),  # no data
        header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234"),
        header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}, b"12345678"),
        header({"a": {"dtype": "PICKLE", "shape": [2], "data_offsets": [0, 8]}}, b"12345678"),
        header({"a": {"dtype": "F32", "shape": [-2, -1], "data_offsets": [0, 8]}}, b"12345678"),
    ],
)
def test_nonsense_is_refused_by_name(tmp_path, content):
    (tmp_path / "bad.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"bad\.safetensors is"):
        read_header(tmp_path / "bad.safetensors")


def test_metadata_may_have_any_text(tmp_path):
    tensor = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
    content = header({"__metadata__": {"a\x01": "\x00b\r\n"}, "a": tensor}, b"1")
    (tmp_path / "odd.safetensors").write_bytes(content)
    assert read_header(tmp_path / "odd.safetensors")[1] == {"a\x01": "\x00b\r\n"}


def test_tensors_that_share_bytes_are_refused(tmp_path):
    entry = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
    (tmp_path / "bad.safetensors").write_bytes(header({"a": entry, "b": {**entry, "data_offsets": [2, 6]}}, b"123456"))
    with pytest.raises(CheckpointError, match="a and b have the same bytes"):
        read_header(tmp_path / "bad.safetensors")
