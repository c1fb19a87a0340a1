"""Checkpoints and ordinary weights become each other, and nothing is lost on the way."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

import shardwright as sw
from shardwright.checkpoint.convert import convert, open_source
from shardwright.checkpoint.index import HF_INDEX, HF_SINGLE, index_of_weights
from shardwright.checkpoint.manifest import verify
from shardwright.errors import InputError

from .little import little


@pytest.fixture
def saved(tmp_path):
    net, optimizer = little()
    sw.save(tmp_path / "run" / "a", net, optimizer)
    return net, tmp_path / "run" / "a"


def kept(net):
    """What a file has of the model: tied weights once."""
    return {key: value for key, value in net.state_dict().items() if key != "head.weight"}


def test_to_a_file_to_a_folder_and_back(saved, tmp_path):
    net, path = saved
    assert convert(path, tmp_path / "w.safetensors") == "file"
    assert convert(path, tmp_path / "hf") == "hf"
    assert convert(tmp_path / "w.safetensors", tmp_path / "back") == "checkpoint"
    assert convert(tmp_path / "hf", tmp_path / "again") == "checkpoint"

    for file in (tmp_path / "w.safetensors", tmp_path / "hf" / HF_SINGLE):
        tensors = load_file(file)
        assert tensors.keys() == kept(net).keys()
        assert all(torch.equal(tensors[key], value) for key, value in kept(net).items())
    for folder in ("back", "again"):
        verify(tmp_path / folder)
        other, _ = little(seed=1)
        sw.load(tmp_path / folder, other)
        assert all(torch.equal(value, other.state_dict()[key]) for key, value in net.state_dict().items())
        assert open_source(tmp_path / folder).tied == {"head.weight": "up.weight"}


def test_only_floats_are_cast(saved, tmp_path):
    net, path = saved
    convert(path, tmp_path / "w.safetensors", dtype=torch.bfloat16)

    tensors = load_file(tmp_path / "w.safetensors")

    assert torch.equal(tensors["down.bias"], net.down.bias.detach().bfloat16())
    assert tensors["norm.num_batches_tracked"].dtype == torch.int64


def test_large_weights_are_several_files_with_the_others_beside_them(saved, tmp_path):
    net, path = saved
    (tmp_path / "from").mkdir()
    for name in ("config.json", "vocab.txt", "weights.bin", HF_INDEX):
        (tmp_path / "from" / name).write_text("{}")
    convert(path, tmp_path / "hf", shard_size=200, config=tmp_path / "from")

    index, tied = index_of_weights(tmp_path / "hf")

    assert len(index.files) > 1 and index.entries.keys() == kept(net).keys()
    assert tied == {"head.weight": "up.weight"}
    others = {file.name for file in (tmp_path / "hf").iterdir() if file.suffix != ".safetensors"}
    assert others == {"config.json", "vocab.txt", HF_INDEX}
    assert (tmp_path / "hf" / HF_INDEX).read_text() != "{}"


def test_a_single_other_file_is_copied_too(saved, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "beside.json").write_text("{}")
    convert(saved[1], tmp_path / "hf", config=tmp_path / "config.json")
    assert (tmp_path / "hf" / "config.json").exists() and not (tmp_path / "hf" / "beside.json").exists()


@pytest.mark.parametrize(("to", "form"), [("x.safetensors", "hf"), ("x", "file"), ("x.safetensors", "checkpoint")])
def test_a_name_that_does_not_fit_its_form_is_refused(saved, tmp_path, to, form):
    with pytest.raises(InputError, match="can't have form"):
        convert(saved[1], tmp_path / to, form=form)


def test_what_is_not_there_is_named_and_a_folder_of_checkpoints_is_its_latest(saved, tmp_path):
    with pytest.raises(InputError, match="no does not exist"):
        open_source(tmp_path / "no")
    (saved[1].parent / "latest").write_text("a")
    assert open_source(saved[1].parent).keys["up.weight"] == "model/up.weight"
