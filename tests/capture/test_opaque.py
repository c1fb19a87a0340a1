"""A submodule marked with `sw.opaque` is one op, with its parameters, gradients and buffers."""

import copy

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.capture import capture
from shardwright.compile import copy_to_meta
from shardwright.errors import CaptureError, InputError

from ..models.odd import Branching, Memory, Net, Rows
from .agreement import agree


class Around(nn.Module):
    def __init__(self, part: nn.Module, batch: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.part = sw.opaque(part, batch=batch)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        actual = self.part(self.first(x))
        return (actual["y"] if isinstance(actual, dict) else actual).tanh()


class Does(nn.Module):
    def __init__(self, function: object) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def x(rows: int = 6) -> Tensor:
    return torch.randn(rows, 4, dtype=torch.float64)


def test_returns_the_same_module():
    module = nn.Linear(2, 2)
    assert sw.opaque(module) is module


def test_takes_submodules_only():
    with pytest.raises(InputError, match="takes a submodule"):
        sw.opaque(torch.relu)  # type: ignore[type-var]


@pytest.mark.parametrize("part", [nn.Linear(4, 4), Branching(), Rows(), Memory()], ids=lambda part: type(part).__name__)
def test_one_op_with_the_gradients_and_buffers_of_the_submodule(part):
    captured = agree(Around(part), x())
    [op] = [op for op in captured.graph.ops if op.target == "call.opaque"]
    assert op.name == "part / opaque"
    assert not [op for op in captured.graph.ops if op.module_path.startswith("part.")]
    assert set(op.argument("names")) == set(part.state_dict())


def test_two_calls_of_one_submodule_and_tied_weights():
    net = Net(Branching(), Rows(), drop=0.0).double()
    captured = agree(net, x(), x())
    assert [op.name for op in captured.graph.ops if op.target == "call.opaque"] == [
        "block / opaque",
        "odd / opaque",
        "odd@1 / opaque",
    ]
    assert {buffer.key for buffer in captured.graph.buffers if buffer.update} >= {"odd.large", "odd.norm.running_mean"}


def test_arguments_and_results_may_be_nested():
    class Nested(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor], *, options: dict[str, object]) -> list[object]:
            scale = options["scale"] * (2 if pair[0].detach().numpy().any() else 1)
            return [pair[0] * scale, {"other": (pair[1] + pair[0], None)}]

    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.nested = nn.Linear(4, 4).double(), sw.opaque(Nested())

        def forward(self, x: Tensor) -> Tensor:
            first, rest = self.nested((self.linear(x), x), options={"scale": x.sum(), "word": "unused"})
            return first * rest["other"][0]

    [op] = [op for op in agree(Holds(), x()).graph.ops if op.target == "call.opaque"]
    assert len(op.argument("tensors")) == 3


def test_what_no_graph_has_may_be_inside():
    captured = agree(Around(Does(lambda module, x: torch.vmap(module.linear)(x))), x())
    assert captured.opaques["part"].observed is False


def test_the_outermost_mark_counts():
    outer = Branching()
    sw.opaque(outer.norm)
    captured = agree(Around(outer), x())
    assert [op.name for op in captured.graph.ops if op.target == "call.opaque"] == ["part / opaque"]


def test_a_hook_of_the_submodule_is_in_the_graph_once():
    net = Around(nn.Linear(4, 4))
    net.part.register_forward_hook(lambda module, args, out: out * 3)
    agree(net, x())


def test_the_model_is_left_as_it_was():
    net, inputs = Around(Branching()), x()
    before, state, seed = dict(vars(net.part)), copy.deepcopy(net.state_dict()), torch.get_rng_state()
    capture(net, (inputs,))
    assert dict(vars(net.part)).keys() == before.keys()
    assert all(torch.equal(tensor, state[key]) for key, tensor in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), seed)


def test_fakes_are_enough_where_no_data_decides():
    skeleton = copy_to_meta(Around(nn.Linear(4, 4)))
    assert capture(skeleton, (torch.empty(6, 4, dtype=torch.float64, device="meta"),)).opaques["part"].observed is False


def test_what_only_a_run_can_tell_needs_values():
    with pytest.raises(CaptureError, match="part returns can only be seen by running the model"):
        capture(copy_to_meta(Around(Branching())), (x(),))


def writes_in_place(module: nn.Module, x: Tensor) -> Tensor:
    return x.add_(1)


def writes_to_a_parameter(module: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        module.linear.weight.mul_(2)
    return module.linear(x)


def returns_a_number(module: nn.Module, x: Tensor) -> tuple[Tensor, float]:
    return x, x.sum().item()


def selects(module: nn.Module, x: Tensor) -> Tensor:
    return x[x.sum(1) > 0]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (writes_in_place, "changes one of its arguments in place"),
        (writes_to_a_parameter, "writes to its parameter linear.weight"),
        (returns_a_number, "may depend on data"),
        (selects, "depends on data. Return a tensor of a fixed shape"),
    ],
)
def test_what_can_not_be_opaque_is_refused(function, words):
    with pytest.raises(CaptureError, match=f"part can't be opaque.*{words}"):
        capture(Around(Does(function)), (x(),))


def centres(module: nn.Module, x: Tensor) -> Tensor:
    return x - x.mean(0)


def counts(module: nn.Module, x: Tensor) -> Tensor:
    module.count += 1
    return x


def sums(module: nn.Module, x: Tensor) -> Tensor:
    return x.sum()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (centres, r"what it returns differs by .* when its 6 samples are computed as 2 and 4"),
        (counts, "writes to its buffer count"),
        (sums, "the same batch dim, but the shapes are"),
    ],
)
def test_rows_that_are_not_independent_are_refused(function, words):
    net = Around(Does(function), batch=True)
    with pytest.raises(CaptureError, match=words):
        capture(net, (x(),))


class Detached(torch.autograd.Function):
    """The rows are independent forward, and not backward."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient - gradient.mean(0)


def test_rows_are_checked_backward_too():
    net = Around(Does(lambda module, x: Detached.apply(x)), batch=True)
    with pytest.raises(CaptureError, match="a gradient differs"):
        capture(net, (x(),))


def test_what_could_not_be_checked_is_noted():
    assert any("was not checked" in n for n in capture(copy_to_meta(Around(nn.Linear(4, 4), True)), (x(),)).graph.notes)
    assert any("one sample" in note for note in capture(Around(Rows(), batch=True), (x(1),)).graph.notes)
    assert any("random" in note for note in capture(Around(Rows(drop=0.5), batch=True), (x(),)).graph.notes)
    assert capture(Around(Rows(), batch=True), (x(),)).graph.notes == ()


def test_shapes_that_change_between_calls_are_refused():
    def grows(module: nn.Module, x: Tensor) -> Tensor:
        return x[: 3 if x.detach().numpy().sum() > 0 else 2].mean(1)

    captured = capture(Around(Does(grows)).double(), (x().abs() * 0 + 1,))
    [op] = [op for op in captured.graph.ops if op.target == "call.opaque"]
    wrong = captured.opaques["part"].outputs[0].shape[0] == 3
    stored = [torch.zeros(4, 4).double(), torch.zeros(4).double(), torch.zeros(()).double()]
    inputs = -torch.ones(6, 4).double() if wrong else torch.ones(6, 4).double()
    with pytest.raises(InputError, match="returned tensors of shapes"):
        captured.functions[op.target].call("part", False, "", [inputs], op.argument("names"), stored)
