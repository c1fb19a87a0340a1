"""Capture neither changes the module nor allocates anything."""

import copy
import resource
import time

import pytest
import torch
from torch import Tensor, nn

from shardwright.capture import capture

from ..models.zoo import ZOO
from .agreement import agree


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4, dtype=torch.float64)
        self.head = nn.Linear(4, 10, bias=False, dtype=torch.float64)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids)).logsumexp(-1)


def test_tied_weights_are_one_parameter_with_all_its_keys():
    captured = agree(Tied(), torch.tensor([[1, 2, 3]]))
    [parameter] = captured.graph.parameters
    assert parameter.keys == ("embed.weight", "head.weight")
    assert len(captured.graph.users[parameter.value]) == 2


def test_one_tensor_for_two_arguments_is_two_inputs():
    class Difference(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a * 2 - b

    same = torch.ones(3)
    captured = capture(Difference(), (same, same))
    assert [value.path for value in captured.graph.inputs] == ["a", "b"]
    assert captured.graph.by_name["/ sub"].inputs == ("mul", "b")


@pytest.mark.parametrize("name", ["resnet", "dropout_gpt", "hf_llama"])
def test_the_module_is_as_it_was(name):
    module, args, kwargs = ZOO[name]()
    next(iter(module.children())).eval()
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = copy.deepcopy(module.state_dict())
    identities = [id(value) for value in (*module.parameters(), *module.buffers())]
    flags = [value.training for value in module.modules()]
    random = torch.get_rng_state()
    capture(module, args, kwargs)
    assert identities == [id(value) for value in (*module.parameters(), *module.buffers())]
    assert all(torch.equal(tensor, before[key]) for key, tensor in module.state_dict().items())
    assert all(torch.equal(parameter.grad, torch.ones_like(parameter)) for parameter in module.parameters())
    assert flags == [value.training for value in module.modules()]
    assert torch.equal(random, torch.get_rng_state())
    assert not module._forward_hooks


def test_the_module_is_as_it_was_after_a_failure():
    class Fails(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("no")

    module = Fails(2, 2)
    weight = module.weight
    with pytest.raises(Exception, match="no"):
        capture(module, (torch.ones(2, 2),))
    assert module.weight is weight


def test_a_big_model_on_meta_costs_no_memory():
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=8,
        num_attention_heads=64, num_key_value_heads=8, max_position_embeddings=8192,
    )  # fmt: skip
    with torch.device("meta"):
        module = transformers.LlamaForCausalLM(config)
    ids = torch.empty(8, 4096, dtype=torch.int64, device="meta")
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    captured = capture(module, (), {"input_ids": ids, "labels": ids})
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
    assert sum(captured.graph.values[parameter.value].elements for parameter in captured.graph.parameters) > 8e9
    assert grown < 1.0  # GiB
    assert time.monotonic() - start < 60
