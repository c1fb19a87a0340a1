"""The zoo itself: every model runs on one device, and has the trait it was built for."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .zoo import CASTS_TO_FLOAT32, SEQ, ZOO, loss_of


class LossyCasts(TorchDispatchMode):
    """Counts the casts from float64 to float32."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and (args[0].dtype, result.dtype) == (torch.float64, torch.float32):
            self.count += 1
        return result


def run(name: str, dtype: torch.dtype = torch.float64):
    module, args, kwargs = ZOO[name](dtype=dtype)
    torch.manual_seed(7)  # for dropout
    loss = loss_of(module(*args, **kwargs))
    loss.backward()
    return module, loss.detach()


@pytest.mark.parametrize("name", ZOO)
def test_forward_and_backward(name):
    module, loss = run(name)
    assert loss.isfinite()
    for key, parameter in module.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, f"{key} has no gradient"
            assert parameter.grad.isfinite().all(), key
            assert parameter.grad.dtype == torch.float64


@pytest.mark.parametrize("name", ZOO)
def test_the_list_of_models_with_literal_float32_casts(name):
    with LossyCasts() as casts:
        run(name)
    assert (casts.count > 0) == (name in CASTS_TO_FLOAT32)


@pytest.mark.parametrize("name", ZOO)
def test_two_builds_are_equal(name):
    a, b = ZOO[name](), ZOO[name]()
    for x, y in zip(a.module.state_dict().values(), b.module.state_dict().values(), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)
    torch.testing.assert_close(a.args, b.args, rtol=0, atol=0)


@pytest.mark.parametrize("name", ZOO)
def test_the_batch_size_is_a_choice(name):
    _, args, kwargs = ZOO[name](batch=6)
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    assert {tensor.size(0) for tensor in tensors} == {6}


def test_labels_that_count_differ_between_rows_and_halves():
    _, (_, target), _ = ZOO["gpt_ignore"]()
    counts = (target != -100).sum(1).tolist()
    assert counts[0] == SEQ
    assert len(set(counts)) == len(counts)
    assert sum(counts[:2]) != sum(counts[2:])


def test_custom_backward_doubles_what_autograd_would_give(monkeypatch):
    custom, _ = run("custom_backward")
    monkeypatch.setattr("tests.models.nets.ScaleGradient.apply", lambda x: x)
    plain, _ = run("custom_backward")
    torch.testing.assert_close(custom.up.weight.grad, 2.0 * plain.up.weight.grad)
    torch.testing.assert_close(custom.down.weight.grad, plain.down.weight.grad)


def test_autocast_changes_the_float32_result():
    module, args, _ = ZOO["autocast_mlp"]()
    inside = module(*args)
    with torch.autocast("cpu", enabled=False):
        outside = torch.nn.functional.mse_loss(module.down(torch.nn.functional.gelu(module.up(args[0]))), args[1])
    assert inside != outside
    torch.testing.assert_close(inside, outside, rtol=2e-2, atol=0)


def test_checkpointing_changes_no_value():
    _, kept = run("checkpointed_gpt")
    _, plain = run("gpt")
    assert kept == plain


def test_dropout_is_on():
    assert run("dropout_gpt")[1] != run("gpt")[1]


def test_lora_trains_the_low_rank_part_only():
    module, _ = run("lora")
    assert {name.split(".")[1] for name, p in module.named_parameters() if p.grad is not None} == {"a", "b"}
