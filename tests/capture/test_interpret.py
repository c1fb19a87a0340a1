"""The graph computes what the module computes: the zoo, in training and in eval mode."""

import pytest
import torch

from shardwright.capture import capture, run
from shardwright.errors import InputError

from ..models.zoo import ZOO
from .agreement import agree, tensors_of

IN_LOW_PRECISION = {"autocast_mlp": 0.05}  # a bias added apart is rounded once more in bfloat16


@pytest.mark.parametrize("name", sorted(ZOO))
def test_training_agrees_with_eager(name):
    module, args, kwargs = ZOO[name](dtype=torch.float64, batch=2)
    agree(module, *args, tolerance=IN_LOW_PRECISION.get(name, 1e-12), **kwargs)


@pytest.mark.parametrize("name", ["resnet", "dropout_gpt", "hf_bert_pretraining", "hf_t5"])
def test_eval_agrees_with_eager(name):
    module, args, kwargs = ZOO[name](dtype=torch.float64, batch=2)
    agree(module.eval(), *args, **kwargs)


@pytest.mark.parametrize("name", ["hf_llama", "hf_t5", "autocast_mlp"])
def test_a_promoted_graph_has_no_small_floats(name):
    module, args, kwargs = ZOO[name](dtype=torch.float64, batch=2)
    captured = capture(module, args, kwargs, promote=True)
    _, _, values = run(captured, captured.flatten(args, kwargs), *tensors_of(module))
    assert not {value.dtype for value in captured.graph.values.values()} & {"float32", "float16", "bfloat16"}
    assert not {value.dtype for value in values.values()} & {torch.float32, torch.float16, torch.bfloat16}
    assert not [op for op in captured.graph.ops if op.autocast]


def test_the_callback_sees_every_op_in_order():
    module, args, kwargs = ZOO["mlp"](dtype=torch.float64)
    captured = capture(module, args, kwargs)
    seen = []
    run(
        captured,
        list(args),
        *tensors_of(module),
        callback=lambda op, value, result: seen.append((op.name, len(result))),
    )
    assert seen == [(op.name, len(op.outputs)) for op in captured.graph.ops]


def test_a_missing_parameter_is_named():
    module, args, kwargs = ZOO["mlp"](dtype=torch.float64)
    captured = capture(module, args, kwargs)
    with pytest.raises(InputError, match=r"up\.weight|weight"):
        run(captured, list(args), {}, {})
