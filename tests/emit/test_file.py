"""What the generated file promises to its reader."""

from __future__ import annotations

import ast
import builtins
import re
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from shardwright.emit import emit, validate
from shardwright.errors import LoweringError
from shardwright.plan.lowering import lower
from shardwright.rules import analyse
from tests.emit.emitted import deep_text, lowered, text_of
from tests.lower.test_local import program_of
from tests.parity.threaded import compare
from tests.plan.graphs import deep_gpt, graph_of
from tests.plan.recomputing import plan_of

NAMES = ["gpt", "gqa_fused", "rotary", "hf_llama", "resnet", "unet", "checkpointed_gpt", "regularized", "contrastive"]
PLANS = ["tp=2", "dp=2", "zero3=2,tp=2"]


def methods(text: str) -> dict[str, ast.FunctionDef]:
    (built,) = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef))
    return {node.name: node for node in built.body if isinstance(node, ast.FunctionDef)}


def bound(node: ast.AST) -> set[str]:
    """The names that a shard of code gives a meaning to."""
    names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
    return names | {part.arg for part in ast.walk(node) if isinstance(part, ast.arg)}


def sizes(text: str) -> set[str]:
    """The size symbols at the head of the file."""
    return set(re.findall(r"^(\w+) = \d+", text, re.M))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", NAMES)
def test_the_text_compiles_and_no_name_shadows_a_builtin_a_module_or_a_size(name, plan):
    text = text_of(plan, name)

    compile(text, "generated.py", "exec")
    chosen = (
        sizes(text)
        | set(dir(builtins))
        | {"torch", "F", "comm", "runtime", "shard", "local_size", "ParameterEntry", "Program", "R"}
    )
    for method in methods(text).values():
        assert not (bound(method) - {"self"}) & chosen


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", NAMES)
def test_every_name_that_is_read_has_been_bound(name, plan):
    text = text_of(plan, name)

    known = (
        sizes(text)
        | set(dir(builtins))
        | {"torch", "F", "comm", "runtime", "shard", "local_size", "ParameterEntry", "Program", "R"}
    )
    known |= {"MESH", "GROUPS", "PARAMETERS", "UNITS"}
    for method in methods(text).values():
        read = {part.id for part in ast.walk(method) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)}
        assert read <= bound(method) | known


@pytest.mark.parametrize("plan", ["tp=2", "dp=2,tp=2", "sp=2"])
def test_layers_of_the_same_text_are_one_method_and_a_loop(plan):
    text = text_of(plan)

    assert "block" in methods(text)
    assert text.count("F.scaled_dot_product_attention") == 1
    assert "for at in self.blocks:" in text
    assert '"blocks.*.attn.qkv.weight"' in text


def test_thirty_layers_are_as_short_as_two():
    short, long = text_of("tp=2"), deep_text("tp=2", 30)

    assert len(long.splitlines()) <= len(short.splitlines()) + 2
    assert len(long.splitlines()) < 120


def test_the_number_of_ranks_changes_numbers_and_not_lines():
    """One text for all ranks; 8 or 4096 of them differ in the mesh and in local sizes only."""
    few, many = (text_of(plan, "gpt", batch=1024) for plan in ("dp=4,tp=2", "dp=1024,tp=4"))

    def lines(text: str) -> list[str]:
        return re.sub(r'shard\("tp", [\d, ]+\)', "cut", text.split("class ")[1]).splitlines()

    assert lines(few) == lines(many)


def test_products_name_their_shape_in_size_symbols_and_the_users_source_lines_are_there():
    text = text_of("tp=2")
    lines = text.splitlines()
    products = [(above, line) for above, line in pairwise(lines) if "linear(" in line]

    assert len(products) == 5
    shape = r"# \[B, S, \w+(\*\w+)*\]|# \[B\*S"
    assert all(re.search(shape, line) or re.search(r"^ +" + shape, above) for above, line in products)
    assert re.search(r"transformer\.py:\d+", text)


def test_a_partial_sum_and_what_backward_sends_are_said_in_words():
    text = text_of("tp=2")

    assert "a partial sum over tp\n        proj = comm.all_reduce_(proj, self.tp)  # [B, S, D]\n" in text
    assert re.search(r"# \[B, S, m\]; backward sums dln2 over tp", text)


def test_a_region_that_the_model_recomputes_is_a_method_run_by_recompute():
    text = text_of("tp=2", "checkpointed_gpt")

    assert "runtime.recompute(self.block, at, " in text
    assert text.count("F.scaled_dot_product_attention") == 1


def recomputed(plan: str, *paths: str) -> str:
    graph = deep_gpt(6)
    analysis = analyse(graph)
    return emit(lower(graph, plan_of(graph, plan, *paths, analysis=analysis), analysis)).text


def test_layers_that_are_all_recomputed_are_one_method_and_a_loop():
    text = text_of("tp=2,recompute")

    assert "        for at in self.blocks:\n            x = runtime.recompute(self.block, at, x)\n" in text
    assert list(methods(text)) == ["constants", "block", "forward"]


def test_layers_of_which_some_are_recomputed_are_one_method_and_two_loops():
    text = recomputed("sp=2", "blocks.0", "blocks.1", "blocks.2")

    assert "        for at in self.blocks[0:3]:\n            x = runtime.recompute(self.block, at, x)\n" in text
    assert "        for at in self.blocks[3:6]:\n            x = self.block(at, x)\n" in text
    assert list(methods(text)) == ["constants", "block", "forward"]


def test_one_layer_that_is_recomputed_shares_the_method_of_the_others():
    text = recomputed("tp=2", "blocks.2")

    assert "runtime.recompute(self.block, self.blocks[2], x)" in text
    assert list(methods(text)) == ["constants", "block", "forward"]


def test_a_part_of_each_layer_is_a_method_that_the_layer_calls_and_is_gathered_for_outside():
    text = recomputed("sp=2", *(f"blocks.{at}.attn" for at in range(6)))

    assert list(methods(text)) == ["constants", "attn", "block", "forward"]
    assert "proj = runtime.recompute(self.attn, at, ln1)" in text
    assert "gather" not in text[text.index("def attn") : text.index("def block")]
    assert text.count("runtime.recompute") == 1


def test_a_region_of_several_layers_is_a_method_with_their_loop():
    text = recomputed("dp=2", "blocks")

    assert "        for at in self.blocks:\n            x = self.block(at, x)\n        return x\n" in text
    assert "runtime.recompute(self.recomputed_blocks, x)" in text


def test_zero3_gathers_a_layer_for_the_lines_that_read_its_parameters():
    text = text_of("zero3=2")

    assert "    def block(self, at, x):  # x [b, S, D]\n        with self.gathered(at):\n            ln1 = " in text
    assert "            down = F.linear(gelu, at.down.weight, at.down.bias)  # [b, S, D]\n        x = x + down" in text
    assert 'UNITS = ["", "blocks.0", "blocks.1"]' in text


class Crossing(nn.Module):
    """Layers that are read in turns: neither is done when the other one begins."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(4 + at, 4 + at) for _ in range(2)) for at in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.layers[0][0](x)
        y = self.layers[1][0](y)
        x = self.layers[0][1](x)
        return x.square().sum() + self.layers[1][1](y).square().sum()


def test_layers_whose_lines_cross_are_opened_and_closed():
    program = program_of(Crossing(), (torch.randn(4, 4), torch.randn(4, 5)), "zero3=2")
    body = emit(program).text.split("def forward")[1]

    steps = re.findall(r"with self.gathered\S+|self.open\S+|self.close\S+|F.linear", body)
    assert steps == [
        'with self.gathered("layers.0"):', "F.linear", 'self.open("layers.1")', "F.linear", "F.linear",
        "F.linear", 'self.close("layers.1")',
    ]  # fmt: skip


def test_a_batch_norm_is_one_line_and_updates_its_buffers_itself():
    text = text_of("dp=2", "resnet")

    assert "        bn1 = self.batch_norm(conv1, self.layer1.bn1, momentum=0.1, eps=1e-05, over=self.dp)" in text
    assert "self.update(" not in text
    assert "num_batches_tracked" not in text


class Averaging(nn.Module):
    """A layer that keeps an average of what it sees in a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x).tanh()
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x


class Averages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Averaging() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,recompute", "zero3=2"])
def test_a_layer_updates_its_buffers_where_they_are_computed(plan):
    text = emit(program_of(Averages(), (torch.randn(6, 4),), plan)).text

    assert re.search(r'average = .*\n +self.update\(f"{at}.average", average\)\n', text)
    compare(Averages(), (torch.randn(6, 4),), plan)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", NAMES)
def test_sizes_never_take_a_name_of_the_users(name, plan):
    """A value is numbered only because another one of its name is read after it."""
    text = text_of(plan, name)

    graph = graph_of(name)
    words = {re.sub(r"(_\d+)+$", "", value) for value in graph.values}
    assert not words & sizes(text)


def test_a_size_is_never_called_as_what_the_file_imports():
    text = text_of("tp=4", "gqa_fused")

    assert "src=R" in text and "from shardwright.runtime import ParameterEntry, Program, R, comm" in text
    assert "R" not in sizes(text)
    with pytest.raises(LoweringError, match="it defines R twice"):
        validate(lowered("tp=4", "gqa_fused"), text.replace("\nG = 2\n", "\nR = 2\n"))


def test_the_table_of_parameters_and_arguments_are_said_in_sizes():
    text = text_of("tp=2")

    assert '"blocks.*.attn.qkv.weight": ParameterEntry(shape=(3*H*E, D), shards={0: shard("tp", 3, 2, h*E)})' in text
    assert "torch.arange(S)" in text
    assert "rows=V)" in text


def test_views_that_are_read_once_stand_in_one_line_with_the_shape_of_the_last():
    text = text_of("tp=2")

    assert "        q = q.view(B, S, h, E).transpose(1, 2)  # [B, h, S, E]  transformer.py:" in text
    assert "        y = y.transpose(1, 2).reshape(B, S, h * E)  # [B, S, h*E]  transformer.py:" in text


def test_values_are_called_by_their_roles():
    text = text_of("tp=2")

    assert "        x = x + down  # [B, S, D]\n        return x\n" in text
    assert "        logits = logits.reshape(B * S, V_tp)" in text
    assert "        target = target.reshape(B * S)" in text
    assert "        return (loss,)\n" in text


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", NAMES)
def test_a_file_imports_what_it_uses(name, plan):
    tree = ast.parse(text_of(plan, name))

    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.asname or alias.name for node in imports for alias in node.names}
    assert names == names & {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
