"""What tracing would drop is kept: custom backwards, checkpointed regions, library ops."""

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwright.capture import capture

from .agreement import agree, ops


class Tripled(torch.autograd.Function):
    """The value times `factor`; the gradient, wrongly and on purpose, times three."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        return x * factor

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3, None


class Pair(torch.autograd.Function):
    @staticmethod
    def forward(x, y):
        return x + y, x - y

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, first, other):
        return first * 7, other * 11


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class Custom(nn.Module):
    def __init__(self, function: torch.autograd.Function, *args: object) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.function, self.args = function, args

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(self.linear(x), *self.args)


def x() -> Tensor:
    return torch.randn(2, 4, dtype=torch.float64)


def test_a_custom_backward_is_one_op_with_its_own_gradient():
    captured = agree(Custom(Tripled, 2.0), x())
    [op] = [op for op in captured.graph.ops if op.target.startswith("call.")]
    assert op.target == f"call.{__name__}.Tripled"
    assert op.argument("arg1") == 2.0
    assert (captured.functions[op.target].module, captured.functions[op.target].qualname) == (__name__, "Tripled.apply")
    assert captured.graph.values[op.outputs[0]].gradient


def test_a_function_that_returns_its_input():
    agree(Custom(Identity), x())


def test_a_function_with_setup_context_and_two_outputs():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            first, other = Pair.apply(self.linear(x), x)
            return first * other

    captured = agree(Two(), x())
    [op] = [op for op in captured.graph.ops if op.target.startswith("call.")]
    assert op.outputs == ("first", "other")


class Checkpointed(nn.Module):
    def __init__(self, run: object) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(3))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        x = self.run(self.first, x)
        x = self.run(lambda value: self.second(value).tanh(), x)
        return self.last(x)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("partial", [False, True])
def test_checkpointed_calls_are_regions(reentrant, partial):
    run = functools.partial(checkpoint, use_reentrant=reentrant)
    if not partial:
        run = lambda function, x: checkpoint(function, x, use_reentrant=reentrant)  # noqa: E731
    captured = capture(Checkpointed(run), (x().requires_grad_(),))
    regions = {op.name: op.region for op in captured.graph.ops}
    assert regions == {
        "first / linear": "r0",
        "first / bias": "r0",
        "second / linear": "r1",
        "second / bias": "r1",
        "/ tanh": "r1",
        "last / linear": None,
        "last / bias": None,
    }
    assert all(captured.graph.values[op.outputs[0]].gradient for op in captured.graph.ops)


def test_hf_gradient_checkpointing_gives_a_region_for_each_layer():
    from ..models.zoo import ZOO

    module, args, kwargs = ZOO["hf_llama"](dtype=torch.float64)
    # renamed in transformers 5.23
    getattr(module, "activation_checkpointing_enable", module.gradient_checkpointing_enable)()
    captured = capture(module, args, kwargs)
    regions = {op.module_path.split(".self_attn")[0]: op.region for op in ops(captured, "scaled_dot_product_attention")}
    assert len(set(regions.values())) == len(regions) >= 2
    assert None not in regions.values()


@torch.library.custom_op("shardwright_tests::double", mutates_args=())
def double(x: Tensor) -> Tensor:
    return x * 2


double.register_fake(torch.empty_like)
double.register_autograd(lambda ctx, gradient: gradient * 2)


def test_a_library_op_stays_one_op():
    class Library(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return double(x) + 1

    captured = agree(Library(), x())
    [op] = ops(captured, "double")
    assert op.target == "shardwright_tests.double.default"
    assert captured.functions[op.target].module == "torch.ops"
    assert captured.functions[op.target].qualname == "shardwright_tests.double.default"


def test_nothing_stays_patched():
    before = (torch.autograd.Function.apply, torch.utils.checkpoint._checkpoint_without_reentrant_generator)
    capture(Custom(Tripled, 2.0), (x(),))
    after = (torch.autograd.Function.apply, torch.utils.checkpoint._checkpoint_without_reentrant_generator)
    assert before == after


class Configured(torch.autograd.Function):
    """Takes its settings in a dict, as research code does."""

    @staticmethod
    def forward(ctx, x, config):
        ctx.factor = config["factor"]
        return x * config["factor"]

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


def test_a_dict_of_settings_is_an_argument():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return Configured.apply(x * self.weight, {"factor": 3.0, "name": "triple"})

    captured = agree(Model(), torch.randn(2, 3, dtype=torch.float64))
    assert captured.graph.ops[-1].argument("arg1") == {"factor": 3.0, "name": "triple"}
