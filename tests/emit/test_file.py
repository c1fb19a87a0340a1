"""What the generated file promises to its reader."""

from __future__ import annotations

import ast
import builtins
import re
from itertools import pairwise

import pytest

from shardwright.emit import emit
from shardwright.plan.lowering import lower
from shardwright.rules import analyse
from tests.emit.emitted import deep_text, text_of
from tests.plan.graphs import deep_gpt
from tests.plan.recomputing import plan_of

NAMES = ["gpt", "gqa_fused", "rotary", "hf_llama", "resnet", "unet", "checkpointed_gpt", "regularized", "contrastive"]
PLANS = ["tp=2", "dp=2", "zero3=2,tp=2"]


def methods(text: str) -> dict[str, ast.FunctionDef]:
    (made,) = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef))
    return {node.name: node for node in made.body if isinstance(node, ast.FunctionDef)}


def bound(node: ast.AST) -> set[str]:
    """The names that a piece of code gives a meaning to."""
    found = {held.id for held in ast.walk(node) if isinstance(held, ast.Name) and isinstance(held.ctx, ast.Store)}
    return found | {held.arg for held in ast.walk(node) if isinstance(held, ast.arg)}


def sizes(text: str) -> set[str]:
    """The size symbols at the head of the file."""
    return set(re.findall(r"^(\w+) = \d+", text, re.M))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", NAMES)
def test_the_text_compiles_and_no_name_shadows_a_builtin_a_module_or_a_size(name, plan):
    text = text_of(plan, name)

    compile(text, "generated.py", "exec")
    taken = (
        sizes(text)
        | set(dir(builtins))
        | {"torch", "F", "comm", "runtime", "shard", "local_size", "ParameterEntry", "Program", "R"}
    )
    for method in methods(text).values():
        assert not (bound(method) - {"self"}) & taken


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
        read = {held.id for held in ast.walk(method) if isinstance(held, ast.Name) and isinstance(held.ctx, ast.Load)}
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


def test_a_partial_sum_and_its_reduction_are_said_in_words():
    text = text_of("tp=2")

    assert "a partial sum over tp" in text
    assert "# sums" in text
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


def test_zero3_opens_units_in_the_order_of_the_list():
    text = text_of("zero3=2")

    assert "self.open(at)" in text
    assert "self.close(at)" in text
    assert 'UNITS = ["", "blocks.0", "blocks.1"]' in text


def test_buffer_writes_are_made_at_the_end_of_forward():
    lines = [line.strip() for line in text_of("dp=2", "resnet").split("def forward")[1].splitlines()]
    writes = [at for at, line in enumerate(lines) if line.startswith("self.update(")]

    assert writes
    assert writes[-1] == len(lines) - 2
    assert writes == list(range(writes[0], writes[0] + len(writes)))
