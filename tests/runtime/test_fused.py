"""Adam's fused kernel is used where it is right, and only there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.profiler import ProfilerActivity, profile

from shardwright.runtime.optimizer.adopt import adopt

KINDS = {
    "adam": lambda value, **message: torch.optim.Adam(value, lr=0.1, amsgrad=True, **message),
    "adamw": lambda value, **message: torch.optim.AdamW(value, lr=0.1, weight_decay=0.1, **message),
}


def parameters() -> list[Parameter]:
    torch.manual_seed(0)
    return [Parameter(torch.randn(shape, dtype=torch.float64)) for shape in [(6, 8), (5,), (0, 3), ()]]


def across(gradient: Tensor) -> Tensor:
    """The same values, the other way round in memory."""
    return gradient.mT.contiguous().mT if gradient.dim() == 2 else gradient


def trained(make, parameters, *, adopted, lay=lambda gradient: gradient, steps=3, **message):
    """An optimizer after some steps, and the names of the ops that it ran."""
    optimizer = make(parameters, **message)
    if adopted:
        adopt(optimizer, {})
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for step in range(steps):
            for number, parameter in enumerate(parameters):
                torch.manual_seed(100 * step + number)
                parameter.grad = lay(torch.randn(parameter.shape, dtype=parameter.dtype))
            optimizer.step()
    return optimizer, {event.key for event in seen.key_averages()}


def is_fused(ops: set[str]) -> bool:
    return any("_fused_adam" in name for name in ops)


@pytest.mark.parametrize("lay", [lambda gradient: gradient, across], ids=["as they are", "across"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_update_is_that_of_torch_however_gradients_lie_in_memory(kind, lay):
    theirs, ours = parameters(), parameters()
    _, plain = trained(KINDS[kind], theirs, adopted=False)
    optimizer, ops = trained(KINDS[kind], ours, adopted=True, lay=lay)
    assert not is_fused(plain) and is_fused(ops) == (lay is not across)
    torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-14)
    assert all(group["fused"] is None for group in optimizer.param_groups)


def test_the_class_that_is_made_first_does_not_matter(monkeypatch):
    """torch wraps the step of a class when the first of it is made; that of AdamW is Adam's, or Adam's wrapped."""
    monkeypatch.setattr(torch.optim.AdamW, "step", torch.optim.Optimizer.profile_hook_step(torch.optim.Adam.step))
    _, ops = trained(KINDS["adamw"], parameters(), adopted=True)
    assert is_fused(ops)


def test_a_parameter_that_lies_across_is_updated_right():
    theirs = [Parameter(across(parameter.detach())) for parameter in parameters()]
    ours = [Parameter(across(parameter.detach())) for parameter in parameters()]
    trained(KINDS["adamw"], theirs, adopted=False)
    _, ops = trained(KINDS["adamw"], ours, adopted=True)
    assert not is_fused(ops)
    torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("message", [{"foreach": False}, {"fused": False}, {"foreach": True}])
def test_what_somebody_has_said_is_kept(message):
    _, ops = trained(KINDS["adamw"], parameters(), adopted=True, **message)
    assert not is_fused(ops)


def test_steps_that_were_counted_in_doubles_go_on():
    """torch counts steps in the default dtype, and the kernel in float32."""
    torch.set_default_dtype(torch.float64)
    try:
        ours, theirs = parameters(), parameters()
        for value, adopted in ((ours, True), (theirs, False)):
            before, _ = trained(KINDS["adamw"], value, adopted=False)
            assert before.state[value[0]]["step"].dtype == torch.float64

            def again(params, before=before, **message):
                built = KINDS["adamw"](params, **message)
                built.load_state_dict(before.state_dict())
                return built

            trained(again, value, adopted=adopted)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-14)


def test_an_own_step_is_run_as_it_is():
    class Own(torch.optim.AdamW):
        elementwise = True

        def step(self, closure=None):
            assert all(group["fused"] is None for group in self.param_groups)
            return super().step(closure)

    _, ops = trained(lambda value, **message: Own(value, **message), parameters(), adopted=True)
    assert not is_fused(ops)
