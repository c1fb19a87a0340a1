"""Nested arguments and results come and go as the user wrote them."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from shardwright.capture import capture, run
from shardwright.errors import InputError

from ..models.zoo import ZOO
from .agreement import agree, tensors_of


@dataclass
class Batch:
    x: Tensor
    y: Tensor


@dataclass
class Result:
    loss: Tensor
    parts: tuple[Tensor, ...]
    note: str = "fine"


class Nested(nn.Module):
    def forward(self, batch: dict, *more: Tensor, flag: bool = False, last: Batch | None = None) -> dict:
        x = batch["x"] + more[0] * (2 if flag else 3)
        return {"out": x - last.y, "pair": (x, None), "flag": flag, "result": Result(x.sum(), (x,))}


def call() -> tuple[tuple, dict]:
    return ({"x": torch.ones(2, 3)}, torch.ones(2, 3)), {
        "last": Batch(torch.ones(2, 3), torch.full((2, 3), 4.0)),
        "flag": True,
    }


def test_paths_of_inputs_and_outputs():
    args, kwargs = call()
    captured = agree(Nested(), *args, **kwargs)
    assert [value.path for value in captured.graph.inputs] == ["batch['x']", "more[0]", "last.x", "last.y"]
    assert [output.path for output in captured.graph.outputs] == [
        "out", "pair[0]", "pair[1]", "flag", "result.loss", "result.parts[0]", "result.note",
    ]  # fmt: skip
    assert captured.graph.batch == 2


def test_results_are_rebuilt():
    args, kwargs = call()
    captured = capture(Nested(), args, kwargs)
    outputs, _, _ = run(captured, captured.flatten(args, kwargs), {}, {})
    result = captured.unflatten(outputs)
    assert isinstance(result["result"], Result)
    assert result["result"].note == "fine"
    assert result["pair"][1] is None
    assert torch.equal(result["out"], torch.full((2, 3), -1.0))


def test_another_literal_or_another_keyword_asks_for_another_capture():
    args, kwargs = call()
    captured = capture(Nested(), args, kwargs)
    captured.flatten(args, dict(reversed(kwargs.items())))
    with pytest.raises(InputError, match="flag was True"):
        captured.flatten(args, {**kwargs, "flag": False})
    with pytest.raises(InputError, match="keyword"):
        captured.flatten(args, {"flag": True})


def test_keywords_in_another_order_than_the_signature():
    class Two(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a - 2 * b

    captured = agree(Two(), b=torch.ones(2), a=torch.zeros(2))
    assert [value.path for value in captured.graph.inputs] == ["b", "a"]


def test_an_hf_cache_comes_back_as_a_cache():
    module, args, kwargs = ZOO["hf_llama"](dtype=torch.float64)
    module.config.use_cache = True
    captured = capture(module.eval(), args, kwargs)
    outputs, _, _ = run(captured, captured.flatten(args, kwargs), *tensors_of(module))
    built = captured.unflatten(outputs)
    expected = module(*args, **kwargs)
    if expected.past_key_values is not None:
        assert type(built.past_key_values) is type(expected.past_key_values)
        assert built.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()
    assert torch.equal(built.loss, expected.loss)


def test_a_batch_size_is_that_of_the_inputs_that_sizes_tell():
    class Add(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a + b

    actual = capture(Add(), (torch.ones(2, 3), torch.ones(3))).graph
    assert actual.batch == 2 and [value.batched for value in actual.inputs] == [True, False]


def test_a_batch_size_that_sizes_do_not_tell_is_none():
    class Both(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a.sum() + b.sum()

    assert capture(Both(), (torch.ones(2, 3), torch.ones(4))).graph.batch is None
