"""`register_op`: an own function is one op, its rule is put to the test, and models with it train on many ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardwright as sw
from shardwright.capture import capture
from shardwright.cluster.catalogue import DEVICES
from shardwright.cost import TrainingSetup, flops, local_call, op_time, saved_for_backward
from shardwright.errors import RuleError
from shardwright.layout import Axis, Mesh
from shardwright.plan import Plan
from shardwright.plan.builder import PlanBuilder
from shardwright.rules import analyse
from shardwright.runtime import SplitDim
from shardwright.runtime.collectives import comm
from tests.capture.agreement import agree

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch.compile looks at it


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


# The ops of these tests, one of each kind. They are registered, and so checked, when this file is imported.


@sw.register_op("b k+, n k+ -> b n")
def product(x, w):
    return torch.einsum("bk,nk->bn", x, w)


@sw.register_op("b (h d^) -> b (h d^)")
def by_heads(x: Tensor, h: int, scale: float = 2.0) -> Tensor:
    """Every head normalised by itself."""
    rows = x.reshape(x.shape[0], h, -1)
    return (F.normalize(rows, dim=-1) * scale).reshape(x.shape)


@sw.register_op("b d -> b d")
class Bent(torch.autograd.Function):
    """A tanh; its gradient is made up, and is a function of the gradient of each element."""

    @staticmethod
    def forward(ctx, x, slope: float):
        ctx.save_for_backward(x)
        ctx.slope = slope
        return (x * slope).tanh()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * g * x.sigmoid() * ctx.slope, None


@torch.library.custom_op("shardwright_register::shifted", mutates_args=())
def shifted(x: Tensor, bias: Tensor | None = None, factor: float = 1.0) -> Tensor:
    return x * factor + (0 if bias is None else bias)


@shifted.register_fake
def _(x, bias=None, factor=1.0):
    return torch.empty_like(x)


shifted.register_autograd(
    lambda ctx, g: (g * ctx.factor, None if ctx.bias is None else g.sum(0), None),
    setup_context=lambda ctx, inputs, output: ctx.__dict__.update(bias=inputs[1], factor=inputs[2]),
)
shifted = sw.register_op("b d, d -> b d", shifted)

CALLS = []


def counted(graph, example):
    """A backend of torch.compile that counts the calls of what it compiled."""

    def run(*args):
        CALLS.append(graph)
        return graph(*args)

    return run


def gated(x: Tensor, y: Tensor) -> Tensor:
    return F.silu(x) * y


fast_gated = sw.register_op("b d, b d ~1 -> b d", torch.compile(gated, backend=counted))


@sw.register_op("b d^ -> b d^, b")
def with_length(x):
    length = x.norm(dim=-1)
    return x / length[:, None], length


@sw.register_op("b d -> b d")
def doubled_(x):
    """Changes what it is given, and returns it."""
    return x.mul_(2)


def rows_of_part(table, ids, part: SplitDim):
    """The rows that this rank has, zeros for the others: a partial sum."""
    place = ids - part.start
    own = (place >= 0) & (place < part.length)
    return table[place.clamp(0, part.length - 1)] * own.unsqueeze(-1)


@sw.register_op("v=rows+ d, s -> s d", algorithms={"v": rows_of_part})
def lookup(table, ids):
    return table[ids]


def centred_part(x, part: SplitDim):
    """The mean over rows of all ranks, by a sum that also goes backward."""
    total = comm.replicate(comm.all_reduce(x.sum(0), part.group), part.group)
    return x - total / part.size


@sw.register_op("n=centred d -> n d", algorithms={"n": centred_part})
def centred(x):
    return x - x.mean(0)


class Net(nn.Module):
    """All of them in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(randn(8, 6))
        self.weight = nn.Parameter(randn(12, 6))
        self.bias = nn.Parameter(randn(12))
        self.gate, self.down = nn.Linear(6, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        x = x + lookup(self.table, ids)
        up = Bent.apply(product(x, self.weight), 0.7)
        up = by_heads(shifted(up, self.bias, factor=1.5), h=4)
        up = fast_gated(self.gate(x), up)
        up, length = with_length(up)
        up = doubled_(up * 1)
        return (self.down(centred(shifted(up))) * length.unsqueeze(-1)).square().mean()


def example() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return randn(4, 6), torch.randint(8, (4,))


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "dp=2,tp=2"])
def test_a_model_with_every_kind_of_op_trains_as_on_one_device(plan, tmp_path):
    torch.manual_seed(0)
    report = sw.verify(Net(), plan, example=example(), method="threads", compile={"directory": tmp_path})
    assert report.passed, str(report)
    (text,) = (path.read_text() for path in tmp_path.rglob("*.py"))
    for name in ("product", "by_heads", "Bent", "gated", "with_length", "doubled_"):
        assert f'runtime.find("{__name__}.{name}")' in text


def test_every_registered_function_is_one_op():
    kinds = [op.target for op in capture(Net().double(), example()).graph.ops if not op.target.startswith("aten.")]
    assert kinds == [
        f"call.{__name__}.lookup", f"call.{__name__}.product", f"call.{__name__}.Bent",
        "shardwright_register.shifted.default", f"call.{__name__}.by_heads", f"call.{__name__}.gated",
        f"call.{__name__}.with_length", f"call.{__name__}.doubled_", "shardwright_register.shifted.default",
        f"call.{__name__}.centred",
    ]  # fmt: skip


def test_a_registered_function_is_called_as_ever():
    x = randn(3, 8)
    assert torch.equal(by_heads(x, 2), by_heads(x, scale=2.0, h=2))
    assert by_heads.__doc__ == "Every head normalised by itself."
    assert doubled_(x) is x


def test_the_compiled_function_is_what_runs():
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6)

        def forward(self, x):
            return fast_gated(self.first(x), x)

    CALLS.clear()
    assert sw.verify(Gate(), "dp=2", example=(randn(4, 6),), method="threads").passed
    assert CALLS


def test_what_a_function_changes_is_seen_after_it():
    class Changing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x + 1
            doubled_(y)
            return y * 3

    agree(Changing(), randn(2, 4).requires_grad_())


@sw.register_op("b d -> b d")
class Negated(torch.autograd.Function):
    """Changes its input, and says so."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.neg_()

    @staticmethod
    def backward(ctx, g):
        return -g


def test_an_autograd_function_may_change_its_input():
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x) * 2
            z = Negated.apply(y)
            return (y * z + x).square().mean()

    agree(Changing().double(), randn(4, 6))
    assert sw.verify(Changing(), "dp=2", example=(randn(4, 6),), method="threads").passed


def test_a_library_op_is_returned_as_it_was():
    assert isinstance(shifted, torch.library.CustomOpDef)


def test_a_library_op_that_changes_its_arguments_is_refused():
    @torch.library.custom_op("shardwright_register::grown_", mutates_args=("x",))
    def grown_(x: Tensor) -> None:
        x.add_(1)

    with pytest.raises(RuleError, match="changes its arguments; register a function around it, which may do so"):
        sw.register_op("b ->", grown_)


def test_a_rank_gets_its_own_size_of_a_label_named_as_an_argument(tmp_path):
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)

        def forward(self, x):
            return self.down(by_heads(self.up(x), h=4)).square().mean()

    plan = sw.plan(Heads(), example=(randn(4, 6).float(),), plan="tp=2")
    assert plan.choices("train")["/ by_heads"] == {"tp": "h"}
    assert sw.verify(Heads(), "tp=2", example=(randn(4, 6),), method="threads", compile={"directory": tmp_path}).passed
    (text,) = (path.read_text() for path in tmp_path.rglob("*.py"))
    assert "by_heads(up, n, 2.0)" in text
    assert "n = 2  # N / tp" in text


def split_on(name: str, label: str):
    """A policy that splits one op on one label."""

    def policy(graph, cluster) -> Plan:
        builder = PlanBuilder(graph, Mesh(axes=(Axis(name="tp", size=cluster.size),)))
        (op,) = (op for op in graph.ops if op.name.endswith(name))
        (role,) = (role for role in builder.roles(op) if role.label == label)
        builder.split(op, builder.mesh.axis("tp"), role)
        return builder.finish(f"{name}-{label}")

    return policy


@pytest.mark.parametrize(("name", "label", "size"), [("lookup", "v", 2), ("lookup", "v", 3), ("centred", "n", 2)])
def test_an_own_algorithm_does_its_split(name, label, size, tmp_path):
    torch.manual_seed(0)
    report = sw.verify(
        Net(), split_on(name, label), example=example(), method="threads", ranks=size, compile={"directory": tmp_path}
    )
    assert report.passed, str(report)
    (text,) = (path.read_text() for path in tmp_path.rglob("*.py"))
    assert f'runtime.custom_algorithm("call.{__name__}.{name}", "{label}", self.tp, ' in text


def test_a_rule_may_be_a_function_of_the_arguments():
    def rule(w, transposed):
        assert len(w.shape) == 2
        return "b k+, k+ n -> b n" if transposed else "b k+, n k+ -> b n"

    def probe():
        return [(randn(4, 6), randn(5, 6)), ((randn(4, 6), randn(6, 5)), {"transposed": True})]

    @sw.register_op(rule, probe=probe)
    def multiply(x, w, transposed=False):
        return x @ (w if transposed else w.t())

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Parameter(randn(8, 6)), nn.Parameter(randn(8, 6))

        def forward(self, x):
            return multiply(multiply(x, self.first).tanh(), self.second, transposed=True).square().mean()

    report = sw.verify(Twice(), "tp=2", example=(randn(4, 6),), method="threads")
    assert report.passed, str(report)


def test_a_list_of_tensors_has_one_term():
    @sw.register_op("b d ~1 -> b d", probe=lambda: ([randn(6, 4) for _ in range(3)],))
    def added(xs: list[Tensor], *, factor: float = 1.0) -> Tensor:
        return sum(xs) * factor

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)

        def forward(self, x):
            up = self.first(x)
            return self.second(added([up, up.tanh()], factor=0.5)).square().mean()

    for plan in ("dp=2", "tp=2"):
        report = sw.verify(Sum(), plan, example=(randn(4, 6),), method="threads")
        assert report.passed, str(report)


def test_an_op_may_be_registered_without_a_rule_and_is_probed():
    @sw.register_op()
    def stretched(x):
        return x / x.amax(-1, keepdim=True)

    class Stretch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6)

        def forward(self, x):
            return stretched(self.first(x).exp()).square().mean()

    plan = sw.plan(Stretch(), example=(torch.randn(4, 6),), plan="dp=2")
    assert any("stretched: a b^ -> a b^" in note for note in plan.notes)
    assert sw.verify(Stretch(), "dp=2", example=(randn(4, 6),), method="threads").passed


def test_inputs_for_which_it_is_finite_nowhere_prove_no_rule():
    """Any NaN equals any other, so this rule, which is wrong, would pass."""

    def far_root(x):
        return (x - 9).sqrt().cumsum(-1)

    with pytest.warns(UserWarning, match=r"the rule of far_root is not checked: .*no finite element.*; pass probe="):
        sw.register_op("b d -> b d", far_root)
    with pytest.raises(RuleError, match=r"probe= of far_root_2 needs other inputs: .*no finite element"):
        sw.register_op("b d -> b d", far_root, probe=lambda: (torch.rand(4, 6),))
    with pytest.raises(RuleError, match="split on d"):
        sw.register_op("b d -> b d", far_root, probe=lambda: (10 + torch.rand(4, 6),))


def test_inputs_for_probing_serve_where_values_matter():
    """A matrix that is not positive definite has no such factor."""

    def factor(a):
        return torch.linalg.cholesky(a)

    def probe():
        a = randn(5, 4, 4)
        return (a @ a.mT + torch.eye(4),)

    with pytest.warns(UserWarning, match="the rule of factor is not checked: it does not run on the CPU with random"):
        sw.register_op("b n^ m^ -> b n^ m^", factor)
    sw.register_op("b n^ m^ -> b n^ m^", factor, probe=probe)
    with pytest.raises(RuleError, match="split on n over 2 it does not run on shards"):
        sw.register_op("b n m^ -> b n m^", factor, probe=probe)
    actual = sw.register_op(None, factor, probe=probe)

    class Factors(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6)

        def forward(self, x):
            return actual(torch.eye(6) + self.first(x) @ self.first(x).mT).square().mean()

    plan = sw.plan(Factors(), example=(torch.randn(4, 6, 6),), plan="dp=2")
    assert any("factor" in note and "a b^ c^ -> a b^ c^" in note for note in plan.notes), plan.notes


def softmax(x):
    return x.softmax(-1)


def biased(x, w, bias):
    return x @ w.t() + bias


def mean(x):
    return x.mean(0)


def highest(x):
    return x.amax(-1).detach()


def highest_with_gradient(x):
    return x.amax(-1)


def total(x):
    return x.sum(-1).detach()


def pooled(x, h: int):
    return x.view(x.shape[0], h, -1).mean(-1)


class PerRow(torch.autograd.Function):
    """Forward is right for every split of rows; backward divides by the rows that it sees."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, g):
        return g / len(g)


WRONG = {
    "a softmax over what is split": (
        softmax, "b d -> b d",
        r"the rule 'b d -> b d' of softmax is wrong: split on d over 2 the result is off by \d.*; write d\^ if",
    ),
    "a bias that is added on every rank": (
        biased, "b k+, n k+, n -> b n",
        r"biased is wrong: split on k over 2 the result is off by .*; did you mean & at input 3, which is added once\?",
    ),
    "a mean that is not a sum": (mean, "b+ d -> d", r"mean is wrong: split on b over 2 the result is off by"),
    "a sum that is a maximum": (
        highest, "b d+ -> b", r"highest is wrong: split on d over 2 .*; did you mean d\+max\?",
    ),
    "a maximum that is a sum": (total, "b d+max -> b", r"total is wrong: split on d over 2 .*; did you mean d\+\?"),
    "a maximum with a gradient": (
        highest_with_gradient, "b d+max -> b", r"split on d over 2 the gradient of input 1 is off by",
    ),
    "the wrong atom of a dim": (
        pooled, "b (d^ h) -> b h", r"pooled is wrong: split on h over 2 the result is off by .*write h\^",
    ),
    "a backward that depends on the split": (
        PerRow, "b d -> b d", r"PerRow is wrong: split on b over 2 the gradient of input 1 is off by",
    ),
    "not linear": (softmax, "b d^ ~1 -> b d^", r"softmax is wrong: it is not linear in ~1: .*leave ~1 out"),
    "dims that are not there": (softmax, "b -> b", "a rule of .*softmax.* has 1 dims where the tensor has"),
}  # fmt: skip


@pytest.mark.parametrize("case", list(WRONG)[:-1])
def test_a_wrong_rule_is_refused_with_the_split_that_broke_it(case):
    function, rule, message = WRONG[case]
    with pytest.raises(RuleError, match=message):
        sw.register_op(rule, function)


def test_a_wrong_rule_leaves_nothing_behind():
    """What was refused is not kept: the function is captured as what it computes."""
    with pytest.raises(RuleError):
        sw.register_op("b d -> b d", softmax)

    class Soft(nn.Module):
        def forward(self, x):
            return softmax(x)

    assert [op.target for op in capture(Soft(), (randn(2, 3),)).graph.ops] == ["aten.softmax.int"]


def test_a_wrong_algorithm_is_refused():
    def forgetful(x, part: SplitDim):
        return x - x.mean(0)

    with pytest.raises(RuleError, match="split on n over 2 the result is off by"):
        sw.register_op("n=centred d -> n d", lambda x: x - x.mean(0), algorithms={"n": forgetful})


def test_an_algorithm_and_a_rule_name_the_same_labels():
    with pytest.raises(RuleError, match=r"splits n by an algorithm; pass algorithms=\{'n': ...\}"):
        sw.register_op("n=centred d -> n d", mean)
    with pytest.raises(RuleError, match="has an algorithm for n, and its rule 'n d -> n d' does not say n=name"):
        sw.register_op("n d -> n d", mean, algorithms={"n": mean})


def test_functions_made_inside_of_others_do_not_mix():
    def make(factor):
        return sw.register_op("b d ~1 -> b d", lambda x: x * factor)

    second, three = make(2), make(3)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6)

        def forward(self, x):
            return second(three(self.first(x)) + x).square().mean()

    report = sw.verify(Both(), "dp=2", example=(randn(4, 6),), method="threads")
    assert report.passed, str(report)


def test_what_can_not_be_registered_says_so():
    with pytest.raises(RuleError, match="register_op takes a function"):
        sw.register_op("b -> b", 3)
    with pytest.raises(RuleError, match=r"takes \*\*rest: an op needs names for all of its arguments"):
        sw.register_op("b -> b", lambda x, **rest: x)
    with pytest.raises(RuleError, match="is a function, which says no shapes: pass probe=, or check=False"):
        sw.register_op(lambda x: "b -> b", mean)


def test_unchecked_is_unchecked():
    assert sw.register_op("b+ d -> d", mean, check=False) is not None


def test_no_process_group_is_left_behind():
    assert not dist.is_initialized()


def test_the_planner_prices_an_op_by_the_flops_and_saved_tensors_that_are_said():
    sized = sw.register_op(
        "b d^ -> b d^", lambda x, steps=8: x.tanh(), flops=lambda x, steps: 12.0 * x.elements * steps,
        bytes=lambda x, steps: 2.0 * x.bytes * steps, saved="r",
    )  # fmt: skip

    class Sized(nn.Module):
        def forward(self, x):
            return sized(x, steps=5)

    analysis = analyse(capture(Sized(), (randn(2, 3).requires_grad_(),)).graph)
    (signature,) = analysis.signatures.values()
    call = local_call(signature, {}, Mesh(axes=()), TrainingSetup())

    assert flops(signature) == 12.0 * 6 * 5
    assert call.moved == 2.0 * (6 * 8) * 5
    halved = local_call(signature, {"dp": "b"}, Mesh(axes=(Axis(name="dp", size=2),)), TrainingSetup())
    assert (halved.flops, halved.moved) == (call.flops / 2, call.moved / 2)
    device, least = DEVICES["A100-80GB"], replace(call, moved=None)
    assert op_time(replace(call, moved=1e9), device).forward > 100 * op_time(least, device).forward
    saved = saved_for_backward(call, signature)
    assert (saved.inputs, saved.outputs) == ((False,), (True,))


def test_saved_tensors_that_can_not_be_read_are_refused():
    with pytest.raises(RuleError, match=r"saved='x' of .* can't be read: write numbers of tensors and r"):
        sw.register_op("b d^ -> b d^", lambda x: x.tanh(), saved="x")
