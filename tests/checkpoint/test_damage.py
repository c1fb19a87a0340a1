"""A damaged checkpoint is refused by the name of the file, and no checkpoint runs code."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import shardwright as sw
from shardwright.checkpoint import CheckpointFolder, load_weights, open_checkpoint, verify
from shardwright.checkpoint.disk import digest_of
from shardwright.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from shardwright.errors import CheckpointError

from .little import little, train


@pytest.fixture
def saved(tmp_path):
    """Two checkpoints of a run; the newer one is there to be damaged."""
    net, optimizer = little()
    folder = CheckpointFolder(tmp_path / "run")
    for step in (1, 2):
        train(net, optimizer, 1)
        folder.save(step, net, optimizer)
    return tmp_path / "run" / "step-000002"


def files_of(path):
    return sorted(value.name for value in path.iterdir())


@pytest.mark.parametrize("name", ["index.json", "rank-00000.safetensors", "state.json", MANIFEST])
def test_one_flipped_bit_anywhere_is_found_and_named(saved, name):
    assert name in files_of(saved)
    content = bytearray((saved / name).read_bytes())
    net, optimizer = little(1)
    before = {key: tensor.clone() for key, tensor in net.state_dict().items()}
    for at in range(7, len(content), max(1, len(content) // 23)):
        content[at] ^= 0x04
        (saved / name).write_bytes(content)
        for act in (verify, lambda path: sw.load(path, net, optimizer)):
            with pytest.raises(CheckpointError) as caught:
                act(saved)
            assert str(saved / name) in str(caught.value), str(caught.value)
            if name != MANIFEST:
                assert "step-000001 is complete: load that one" in str(caught.value)
        content[at] ^= 0x04
    (saved / name).write_bytes(content)
    assert not optimizer.state and all(torch.equal(tensor, before[key]) for key, tensor in net.state_dict().items())
    verify(saved)


@pytest.mark.parametrize("name", ["index.json", "rank-00000.safetensors", "state.json"])
def test_missing_and_short_files_are_named(saved, name):
    content = (saved / name).read_bytes()
    (saved / name).write_bytes(content[:-3])
    with pytest.raises(CheckpointError, match=rf"{name} is damaged: it has {len(content) - 3} bytes instead of"):
        verify(saved)
    (saved / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        sw.load(saved, *little())


def test_without_a_manifest_it_is_not_complete(saved):
    (saved / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="not a complete checkpoint: it has no manifest"):
        sw.load(saved, *little())


def test_if_nothing_else_is_intact_the_error_says_so(saved):
    for path in (saved, saved.with_name("step-000001")):
        (path / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no other checkpoint next to it is complete"):
        sw.load(saved, *little())


# -- files that would run code ------------------------------------------------------------------


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def with_right_digests(path):
    """What someone who wants to run code would do too."""
    manifest = read_manifest(path)
    files = {name: digest_of(path / name) for name in manifest.files}
    Manifest(files=files, world=manifest.world, when=manifest.when, step=manifest.step).write(path)


def torch_saved(value, path):
    torch.save(value, path)
    assert zipfile.is_zipfile(path)


@pytest.mark.parametrize("name", ["index.json", "rank-00000.safetensors", "state.json", MANIFEST])
@pytest.mark.parametrize("kind", ["pickle", "torch"])
def test_pickles_in_the_place_of_files_are_refused_and_not_run(saved, tmp_path, name, kind):
    mark = tmp_path / "ran"
    if kind == "pickle":
        (saved / name).write_bytes(pickle.dumps(Evil(mark)))
    else:
        torch_saved(Evil(mark), saved / name)
    if name != MANIFEST:
        with_right_digests(saved)
    with pytest.raises(CheckpointError, match=name):
        sw.load(saved, *little())
    with pytest.raises(CheckpointError, match=name):
        load_weights(saved / name, little()[0])
    assert not mark.exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_pickle_of_dcp_is_not_even_opened(tmp_path):
    """torch's own format keeps its metadata in a pickle, and reads it without a check."""
    net, _ = little()
    dcp.save({"model": net.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    mark = tmp_path / "ran"
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Evil(mark)))
    with pytest.raises(CheckpointError, match="is not a complete checkpoint"):
        sw.load(tmp_path / "dcp", net)
    assert not mark.exists()


def test_an_index_that_points_elsewhere_is_refused(saved, tmp_path):
    (tmp_path / "secret").write_bytes(b"0" * 10**5)
    document = json.loads((saved / "index.json").read_text())
    first = next(iter(document["tensors"].values()))
    for file, start, words in (
        ("../../secret", 0, "file should be the name of a file in its folder"),
        (None, 10**9, "is truncated"),
        (None, -8, "start should be a whole number from 0"),
    ):
        first["chunks"][0][2:] = [file or "rank-00000.safetensors", start]
        (saved / "index.json").write_text(json.dumps(document))
        with_right_digests(saved)
        with pytest.raises(CheckpointError, match=words):
            open_checkpoint(saved)


def test_a_manifest_that_names_files_elsewhere_is_refused(saved):
    manifest = read_manifest(saved)
    Manifest(files={**manifest.files, "../x": manifest.files["state.json"]}, world=1, when="").write(saved)
    with pytest.raises(CheckpointError, match="the name of a file in its folder"):
        verify(saved)
