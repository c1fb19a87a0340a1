"""Ordinary weights: a model starts from a Hugging Face checkpoint and ends as one, under any plan."""

from __future__ import annotations

import json
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import shardwright as sw
from shardwright.checkpoint import load_weights, save_weights
from shardwright.checkpoint.tensorfile import MappedFiles, Spec
from shardwright.checkpoint.weights import _shards
from shardwright.errors import CheckpointError, InputError

from .little import Net, little

IDS = torch.arange(16).reshape(2, 8)


def llama():
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "vocab_size": 64}
    config = LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2, use_cache=False)
    return LlamaForCausalLM(config)


def gpt2():
    """With tied weights."""
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**shape, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def test_files_are_filled_up_to_their_size_and_none_is_empty():
    specs = {
        name: Spec(dtype=torch.float32, shape=(size,)) for name, size in zip("abcde", (9, 1, 1, 2, 1), strict=True)
    }
    assert list(_shards(specs, 16)) == [["a"], ["b", "c", "d"], ["e"]]
    assert list(_shards(specs, 1)) == [["a"], ["b"], ["c"], ["d"], ["e"]]
    assert list(_shards(specs, 1000)) == [["a", "b", "c", "d", "e"]]


MODELS = {"llama": llama, "gpt2": gpt2}


@pytest.fixture(scope="module", params=MODELS)
def original(request, tmp_path_factory):
    """A folder as Hugging Face writes it, in several files, and what the model in it computes."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp(request.param)
    model = MODELS[request.param]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder / "hf", max_shard_size="20kB")
    assert len(list((folder / "hf").glob("model-*.safetensors"))) > 2
    return request.param, folder, model(input_ids=IDS, labels=IDS).loss.item(), model.state_dict()


def go_through(rank, name, plan, folder):
    """Start from the folder, and end as another. What was read of the files, in bytes at once and in all."""
    read = []
    box = MappedFiles.box

    def counted(self, *args):
        actual = box(self, *args)
        read.append(actual.numel() * actual.element_size())
        return actual

    torch.manual_seed(5 + rank)
    example = {"input_ids": IDS, "labels": IDS}
    model = sw.parallelize(MODELS[name](), plan=plan, example=example, compile={"directory": f"{folder}/generated"})
    with mock.patch.object(MappedFiles, "box", counted):
        load_weights(f"{folder}/hf", model)
    loss = float(model(**example).loss.detach())
    save_weights(f"{folder}/{plan}", model, shard_size=20_000)
    save_weights(f"{folder}/{plan}.safetensors", model)
    return loss, sum(read)


@pytest.mark.parametrize("plan", ["tp=2", "zero3=2", "pp=2", "pp=2,tp=2"])
def test_from_a_folder_and_to_a_folder(pools, original, plan):
    name, folder, loss, state = original
    size = 4 if "," in plan else 2
    results = pools[size].run(go_through, name, plan, str(folder), timeout=240)
    assert [mine for mine, _ in results] == pytest.approx([loss] * size, rel=1e-5)
    total = sum(value.numel() * 4 for value in {value.data_ptr(): value for value in state.values()}.values())
    assert max(read for _, read in results) < (0.8 if name == "llama" else 0.95) * total
    assert sorted(path.name for path in (folder / plan).glob("*.json")) == [
        "config.json", "generation_config.json", "model.safetensors.index.json",
    ]  # fmt: skip
    ended = AutoModelForCausalLM.from_pretrained(folder / plan)
    assert type(ended) is type(MODELS[name]())
    for key, tensor in ended.state_dict().items():
        assert torch.equal(tensor, state[key]), key
    single = load_file(folder / f"{plan}.safetensors")
    assert all(torch.equal(value, state[key]) for key, value in single.items())
    ended.generate(IDS[:, :4], max_new_tokens=2, do_sample=False, pad_token_id=0)


def without_values(make):
    """A model whose parameters are on meta, and whose buffers (rotary angles) are not."""
    torch.manual_seed(0)
    model = make()
    for module in model.modules():
        for key, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[key] = torch.nn.Parameter(parameter.to("meta"))
    model.tie_weights()
    return model


def start_empty(rank, name, plan, folder):
    """A model that never is whole anywhere: its shards are made empty, and filled from the files."""
    model = without_values(MODELS[name])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    example = {"input_ids": IDS, "labels": IDS}
    model, optimizer = sw.parallelize(
        model, optimizer, plan=plan, example=example, compile={"directory": f"{folder}/generated"}
    )
    with pytest.raises(InputError, match="were on meta and have no values yet"):
        model(**example)
    with pytest.raises(InputError, match="were on meta and have no values yet"):
        sw.save(f"{folder}/never", model)
    load_weights(f"{folder}/hf", model)
    losses = []
    for _ in range(2):
        loss = model(**example).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("plan", ["zero3=2", "pp=2"])
def test_a_model_on_meta_is_filled_shard_by_shard(pools, original, plan):
    name, folder, loss, _ = original
    for losses in pools[2].run(start_empty, name, plan, str(folder), timeout=240):
        assert losses[0] == pytest.approx(loss, rel=1e-5)
        assert losses[1] < losses[0]


def unlike(rank, folder):
    model = without_values(llama) if rank else llama()
    with pytest.raises(InputError, match="some ranks have parameters on meta"):
        sw.parallelize(model, plan="dp=2", example={"input_ids": IDS, "labels": IDS}, compile={"directory": folder})


def test_all_ranks_have_values_or_none(pools, tmp_path):
    pools[2].run(unlike, str(tmp_path), timeout=120)


def test_tied_weights_once_or_under_all_keys(tmp_path):
    net, _ = little()
    save_weights(tmp_path / "once.safetensors", net)
    save_weights(tmp_path / "all.safetensors", net, tied="all")
    assert set(load_file(tmp_path / "all.safetensors")) - set(load_file(tmp_path / "once.safetensors")) == {
        "head.weight"
    }
    other = Net().double()
    assert load_model(other, tmp_path / "once.safetensors") == (set(), [])  # as the package ties them
    assert torch.equal(other.head.weight, net.up.weight)
    for name in ("once", "all"):
        third = Net().double()
        load_weights(tmp_path / f"{name}.safetensors", third)
        assert all(torch.equal(tensor, net.state_dict()[key]) for key, tensor in third.state_dict().items())


def test_a_tied_weight_may_have_any_of_its_keys(tmp_path):
    net, _ = little()
    by_key = {key: value for key, value in net.state_dict().items() if key != "up.weight"}
    save_file(by_key, tmp_path / "x.safetensors")
    other, _ = little(1)
    load_weights(tmp_path / "x.safetensors", other)
    assert torch.equal(other.up.weight, net.up.weight)


def test_another_dtype(tmp_path):
    net, _ = little()
    save_weights(tmp_path / "x.safetensors", net, dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "x.safetensors")
    assert tensors["up.weight"].dtype == torch.bfloat16 and tensors["norm.num_batches_tracked"].dtype == torch.int64
    other, _ = little(1)
    load_weights(tmp_path / "x.safetensors", other)
    assert torch.equal(other.up.weight, net.up.weight.bfloat16().double())


def test_a_folder_has_one_file_or_several_and_no_old_ones(tmp_path):
    net, _ = little()
    save_weights(tmp_path / "hf", net, shard_size=300)
    several = sorted(path.name for path in (tmp_path / "hf").iterdir())
    assert several[0] == "model-00001-of-00003.safetensors" and several[-1] == "model.safetensors.index.json"
    document = json.loads((tmp_path / "hf" / several[-1]).read_text())
    assert set(document["weight_map"]) == set(net.state_dict()) - {"head.weight"}
    load_weights(tmp_path / "hf", little(1)[0])
    save_weights(tmp_path / "hf", net)
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["model.safetensors"]
    load_weights(tmp_path / "hf", little(1)[0])


def test_all_that_does_not_fit_is_named(tmp_path):
    net, _ = little()
    stored = {**net.state_dict(), "up.bias": torch.zeros(5), "more": torch.zeros(1)}
    del stored["head.weight"], stored["down.bias"]
    save_file(stored, tmp_path / "x.safetensors")
    before = net.up.weight.clone()
    words = r"(?s)missing: down.bias.*unexpected: more"
    with pytest.raises(CheckpointError, match=words) as caught:
        load_weights(tmp_path / "x.safetensors", net)
    assert "up.bias has shape (6,), and was saved with (5,)" in str(caught.value)
    assert torch.equal(net.up.weight, before)
    del stored["up.bias"]
    save_file(stored, tmp_path / "x.safetensors")
    load_weights(tmp_path / "x.safetensors", net, strict=False)


def test_what_is_not_there_is_said(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no weights: neither model.safetensors nor"):
        load_weights(tmp_path, little()[0])
    save_weights(tmp_path / "hf", little()[0], shard_size=300)
    (tmp_path / "hf" / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"is incomplete: model-00002-of-00003.safetensors is missing"):
        load_weights(tmp_path / "hf", little()[0])
    with pytest.raises(InputError, match="tied='twice'"):
        save_weights(tmp_path / "y", little()[0], tied="twice")


def no_room(rank, folder):
    """The first rank's disk is full; the other one must not wait for it for ever."""
    from shardwright.checkpoint import disk

    model = sw.parallelize(
        llama(), plan="tp=2", example={"input_ids": IDS, "labels": IDS}, compile={"directory": f"{folder}/g"}
    )
    left = [2]

    def full(self, data):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device", str(self.path))

    with mock.patch.object(disk.AtomicFile, "write", full), pytest.raises(CheckpointError, match="No space left"):
        save_weights(f"{folder}/x.safetensors", model)
    save_weights(f"{folder}/y.safetensors", model)


def test_a_full_disk_is_an_error_on_all_ranks(pools, tmp_path):
    pools[2].run(no_room, str(tmp_path), timeout=120)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["y.safetensors"]
