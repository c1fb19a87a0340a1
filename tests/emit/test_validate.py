"""Generated code is read back: every change of it is a LoweringError, and what the issue found wrong is right."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwright as sw
from shardwright import runtime
from shardwright.capture import capture
from shardwright.cluster import find
from shardwright.emit import emit, validate
from shardwright.errors import LoweringError
from shardwright.lower import LoweredProgram
from shardwright.ops import defined
from shardwright.ops.printing import function
from shardwright.plan import build_plan, parse_plan_string
from shardwright.plan.lowering import lower, lower_pipeline
from shardwright.plan.pipeline import build_pipeline
from shardwright.runtime.algorithms.random import Randomness
from shardwright.runtime.collectives import comm
from tests.emit.mutants import survivors
from tests.lower.test_local import Losses, program_of
from tests.lower.test_tidy import Row
from tests.models.deciding import Chooses, Net
from tests.parity.threaded import compare
from tests.plan.graphs import analysis_of, graph_of
from tests.test_register import centred, split_on


def programs_of(name: str, plan: str) -> tuple[LoweredProgram, ...]:
    graph, analysis, request = graph_of(name, 4), analysis_of(name, 4), parse_plan_string(plan)
    if "pp" in plan:
        return lower_pipeline(graph, build_pipeline(graph, request, analysis, "", 2), analysis).programs
    return (lower(graph, build_plan(graph, request, analysis), analysis),)


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("gpt", "dp=2,tp=2"),
        ("gpt", "zero3=2,recompute"),
        ("resnet", "dp=2"),
        ("dropout_gpt", "tp=2"),
        ("gpt", "pp=2,zb"),
    ],
)
def test_every_change_of_a_generated_class_is_noticed(name: str, plan: str) -> None:
    for program in programs_of(name, plan):
        count, left = survivors(program, emit(program).text)
        assert count > 200
        assert left == []


def test_a_fault_names_the_line_the_op_and_the_argument() -> None:
    (program,) = programs_of("gpt", "tp=2")
    text = emit(program).text.replace("is_causal=True", "is_causal=False")
    with pytest.raises(LoweringError, match=r"line \d+, .*scaled_dot_product_attention.*is_causal is False in it, and"):
        validate(program, text)


def test_a_changed_size_is_noticed() -> None:
    (program,) = programs_of("gpt", "tp=2")
    with pytest.raises(LoweringError, match="h \\* E"):
        validate(program, emit(program).text.replace("\nh = 2 ", "\nh = 3 "))


@pytest.mark.parametrize("name", ["torch", "torch.nn.functional as F", "ParameterEntry, ", "comm, ", "Program, "])
def test_a_file_that_does_not_import_what_it_reads_is_refused(name: str) -> None:
    (program,) = programs_of("gpt", "tp=2")
    text = emit(program).text
    line = f"import {name}\n" if not name.endswith(", ") else name
    assert line in text
    with pytest.raises(LoweringError, match="does not import"):
        validate(program, text.replace(line, "", 1))


@pytest.mark.parametrize("name", ["F", "comm", "D", "Transformer"])
def test_no_method_may_bind_a_name_of_the_file(name: str) -> None:
    (program,) = programs_of("gpt", "tp=2")
    with pytest.raises(LoweringError, match="binds no name of its own"):
        validate(
            program,
            re.sub(r"\bgelu\b(?! *\()", name, emit(program).text.replace("F.gelu", "F.GELU")).replace(
                "F.GELU", "F.gelu"
            ),
        )


def test_text_that_is_no_code_is_refused() -> None:
    (program,) = programs_of("gpt", "tp=2")
    with pytest.raises(LoweringError, match="can't be read back"):
        validate(program, emit(program).text + "\n  x = (")


class Waves(nn.Module):
    """Layers that make a constant of their own, without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Wave() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


class Wave(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            wave = torch.arange(6, dtype=x.dtype).cos()
        return self.up(x).tanh() * wave


def test_constants_of_recomputed_layers_are_made_outside_of_their_regions() -> None:
    program = program_of(Waves(), (torch.randn(4, 6),), "dp=2,recompute")
    assert {op.target for op in program.constants} >= {"aten.cos.default"}
    assert {op.region for op in program.constants} != {None}
    validate(program, emit(program).text)


def test_branches_are_methods_that_are_read_back_too() -> None:
    program = program_of(Net(Chooses(), layers=2), (torch.randn(6, 4),), "dp=2")
    text = emit(program).text
    assert text.count("def cond") == 4
    validate(program, text)
    with pytest.raises(LoweringError):
        validate(program, text.replace(".sin()", ".cos()"))


def test_a_method_that_is_missing_is_called_otherwise_or_does_more_is_noticed() -> None:
    program = program_of(Waves(), (torch.randn(4, 6),), "dp=2,recompute")
    text = emit(program).text
    with pytest.raises(LoweringError):
        validate(program, text.replace("def constants(self)", "def constants_of(self)"))
    with pytest.raises(LoweringError, match="it is called with"):
        validate(program, text.replace("(self.layer_2, at, x)", "(self.layer_2, at, x, x)"))
    plain = program_of(Row(), (torch.randn(4, 6),), "dp=2")
    with pytest.raises(LoweringError, match="the program ends before it"):
        validate(
            plain, "import torch\n" + emit(plain).text + "\n    def constants(self):\n        x = torch.arange(3)\n"
        )


def test_an_opaque_part_is_called_as_one() -> None:
    program = program_of(Net(sw.opaque(nn.Linear(4, 4))), (torch.randn(6, 4),), "dp=2")
    text = emit(program).text
    validate(program, text)
    with pytest.raises(LoweringError, match=r"no call of self\.opaque"):
        validate(program, text.replace("self.opaque(", "self.experts("))


class Keeping(Waves):
    """What every layer makes is read after the loop."""

    def forward(self, x: Tensor) -> Tensor:
        kept = [x]
        for layer in self.layers:
            kept.append(layer(kept[-1]))
        return torch.stack(kept).sum()


@pytest.mark.parametrize(
    ("before", "after"), [(".append(layer_1)", ".extend(layer_1)"), (".append(layer_1)", ".append(other)"),
                          ("every_layer.append", "layer.append"), ("every_layer[0]", "every_layer[1]")]
)  # fmt: skip
def test_a_list_of_what_layers_make_is_filled_and_read_in_order(before: str, after: str) -> None:
    program = program_of(Keeping(), (torch.randn(4, 6),), "dp=2")
    text = emit(program).text
    validate(program, text)
    assert before in text
    with pytest.raises(LoweringError, match="would not compute"):
        validate(program, text.replace(before, after))


class Dropping(nn.Module):
    """Masks that are drawn in a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        return torch.cond(x.sum() > 0, lambda x: F.dropout(x, 0.5, True) * 1.0, lambda x: self._attend(x), (x,)).sum()

    def _attend(self, x: Tensor) -> Tensor:
        heads = x.view(1, 2, 2, 4)
        return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.5).view(4, 4)


def test_masks_in_a_branch_are_drawn_by_the_names_of_their_ops() -> None:
    program = program_of(Dropping(), (torch.randn(4, 4),), "dp=2")
    text = emit(program).text
    validate(program, text)
    assert 'self.random.dropout(linear, 0.5, "cond_then: / dropout")' in text
    assert 'op="cond_else: / scaled_dot_product_attention",' in text


class Sliced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return (h[:, ::2] * h[:, 1:4] + h[..., -3:] + h[None, :, :3]).sum() + h[:, 2].sum() + h.select(-1, 3).sum()


class PaddedWith(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return (F.pad(x, (1, 0), value=0.0) + F.pad(x, (0, 1)) + F.pad(x, (1, 0), value=1.5)).square().sum()


def test_a_number_to_pad_with_is_written_where_it_is_not_what_torch_takes() -> None:
    program = program_of(PaddedWith(4, 4), (torch.randn(6, 4),), "dp=2")
    text = emit(program).text
    validate(program, text)
    assert re.findall(r"F\.pad\(.*?\)(.*?)\)", text) == [", value=0.0", "", ", value=1.5"]
    compare(PaddedWith(4, 4), (torch.randn(6, 4),), "dp=2")


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_loss_keeps_its_reduction(reduction: str) -> None:
    program = program_of(Losses(reduction), (torch.randn(4, 6), torch.randint(0, 5, (4,))), "dp=2")
    text = emit(program).text
    validate(program, text)
    assert re.search(rf'F\.cross_entropy\(.*reduction="{reduction}"', text)


class Inspected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4, 1))
        self.register_buffer("order", torch.tensor([2, 0, 1]))

    def forward(self, x: Tensor) -> Tensor:
        built = F.conv1d(x.unsqueeze(-1), self.weight)
        return built[:, self.order].sum() + F.conv2d(x[:, :, None, None], self.weight[..., None]).sum()


def test_an_index_and_convolutions_by_their_number_of_dims() -> None:
    program = program_of(Inspected(), (torch.randn(6, 4),), "dp=2")
    text = emit(program).text
    validate(program, text)
    for call in ("F.conv1d(", "F.conv2d(", "[:, self.order]"):
        assert call in text


def test_slices_are_written_as_people_write_them() -> None:
    program = program_of(Sliced(), (torch.randn(6, 4),), "dp=2")
    text = emit(program).text
    validate(program, text)
    for slice_ in ("[:, ::2]", "[:, 1:4]", "[:, 3:]", "[..., :3]", "[:, 2]", ".select(-1, 3)"):
        assert slice_ in text


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return centred(self.up(x)).square().sum()


def test_a_custom_algorithm_is_called_with_its_label_axes_and_size() -> None:
    graph = capture(Centred(), (torch.randn(6, 4),), {}).graph
    program = lower(graph, split_on("centred", "n")(graph, find("cpu:2")))
    text = emit(program).text
    validate(program, text)
    (call,) = re.findall(r'runtime\.custom_algorithm\("call\.[\w.]+\.centred", "n", self\.tp, \w+\)', text)
    with pytest.raises(LoweringError):
        validate(program, text.replace(call, call.replace('"n"', '"d"')))


# What is written down here again is what torch says of itself.


def _parameters(callee: str) -> list[str]:
    home = {"F": F, "torch": torch, "x": Tensor, "runtime": runtime, "comm": comm, "self": runtime.Program}
    where, _, name = callee.partition(".")
    if where == "self":  # self.random.dropout
        return [*inspect.signature(Randomness.dropout).parameters][1:]
    if callee == "x.to":
        return ["dtype"]  # by its type
    function = getattr(home[where], name)
    try:
        names = [*inspect.signature(function).parameters]
    except ValueError:  # a builtin: the arguments of its op
        op = getattr(torch.ops.aten, name)
        schemas = [getattr(op, overload)._schema for overload in op.overloads() if "out" not in overload]
        names = [argument.name for argument in max(schemas, key=lambda schema: len(schema.arguments)).arguments]
    return names[1:] if where == "x" else names


SPELLED = {"self": ("input", "self", "x", "logits", "logp"), "indices": ("input", "ids"), "axes": ("group", "rows"),
           "p": ("p",), "pad": ("pad",), "sharding": ("sharding", "gather_sharding"),
           "to_sharding": ("shard_sharding",), "to_dim": ("shard_dim", "to_dim"), "dim": ("dim", "gather_dim"),
           "op_key": ("op",), "x": ("x",), "train": ("training",),
           "split_size": ("split_size", "split_sizes"), "split_sizes": ("split_size", "split_sizes")}  # fmt: skip


FORMS = {name: spec for name, spec in defined() if isinstance(spec.reads, str)}


@pytest.mark.parametrize("target", sorted(name for name, spec in FORMS.items() if "*" not in spec.reads))
def test_a_form_has_the_order_that_its_callee_has(target: str) -> None:
    callee, _, rest = FORMS[target].reads.partition("(")
    names = rest.removesuffix(")").split(", ")
    real = _parameters(callee)
    positional = FORMS[target].positional or len(names)
    for at, name in enumerate(names[:positional]):
        assert real[at] == name or real[at] in SPELLED.get(name, ()), (callee, names, real)
    for name in names[positional:]:
        assert name in real or any(other in real for other in SPELLED.get(name, ())), (callee, name, real)


@pytest.mark.parametrize("name", [name for name, spec in defined() if spec.prints is function])
def test_an_op_that_prints_as_a_function_of_torch_is_one(name: str) -> None:
    assert getattr(torch.ops.aten, name).overloads()
    assert callable(getattr(torch, name, None)), f"there is no torch.{name}: {name} needs a printer and `reads`"


def test_ops_that_return_lists_are_known() -> None:
    lists = {
        schema.name.removeprefix("aten::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("aten::") and [str(value.type) for value in schema.returns] == ["List[Tensor]"]
        and schema.overload_name not in ("Sequence", "list", "tensors")
    }  # fmt: skip
    named = {name for name in lists if not name.startswith(("_", "unflatten", "keys", "sorted", "where"))}
    assert named == {name for name, spec in defined() if spec.returns_list}


# What was found wrong.


class Padded(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode, self.scale = mode, nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x * self.scale, (2, 1), mode=self.mode).square().sum()


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular", "constant"])
def test_padding_keeps_its_mode(mode: str) -> None:
    compare(Padded(mode), (torch.randn(4, 3, 8),), "dp=2")


def test_convolutions_keep_their_padding_mode() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x).square().mean()

    compare(Net(), (torch.randn(4, 3, 8, 8),), "dp=2")


def test_logical_and_is_not_a_bitwise_one() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(6))

        def forward(self, x: Tensor, n: Tensor) -> Tensor:
            both = torch.logical_and(n, n + 1) | torch.logical_and(x, x.relu())
            return (x * self.scale * both).sum()

    compare(Net(), (torch.randn(4, 6), torch.randint(0, 5, (4, 6))), "dp=2")


def test_an_embedding_scaled_by_frequency_keeps_its_flag() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 8, scale_grad_by_freq=True)

        def forward(self, ids: Tensor) -> Tensor:
            return self.table(ids).square().sum()

    compare(Net(), (torch.randint(0, 5, (4, 6)),), "single")


@pytest.mark.parametrize("name", ["B", "D", "S", "M", "F", "torch", "Stage", "comm", "PARAMETERS"])
def test_a_model_may_be_called_as_something_in_the_file(name: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up = nn.LayerNorm(8), nn.Linear(8, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(self.norm(x)).view(x.shape[0], -1).square().mean()

    Net.__name__ = name
    compare(Net(), (torch.randn(4, 3, 8),), "dp=2,tp=2")


class Shuffled(nn.Module):
    """Units as ShuffleNet has them: stages of layers that do the same, each after a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(Unit() for _ in range(3))
        self.between = nn.Linear(8, 8)
        self.more = nn.ModuleList(Unit() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for unit in self.stages:
            x, aside = unit(x)
            kept.append(aside)
        x = self.between(x)
        for unit in self.stages:
            x, aside = unit(x)
        for unit in self.more:
            x, aside = unit(x)
            kept.append(aside)
        return sum(value.square().mean() for value in kept) + x.square().mean()


class Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        left, right = self.norm(self.linear(x)).chunk(2, 1)
        return torch.cat([right, left.tanh()], 1), left * right


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero3=2"])
def test_two_loops_over_one_method_have_their_own_variables(plan: str) -> None:
    compare(Shuffled(), (torch.randn(4, 8),), plan)


def test_a_list_of_one_is_unpacked() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            (part,) = (x * self.scale).chunk(1, 1)
            (other,) = part[:, :1].unbind(1)
            return part.square().sum() + other.sum()

    compare(Net(), (torch.randn(4, 4),), "dp=2")
