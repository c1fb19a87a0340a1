"""1,024 ranks on a fake process group: the shapes of every value, and one order of collectives for all ranks.

Ranks run one after the other in this process. A collective that one rank issues and another
does not, or in another order or size, would hang a real run.
"""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.parallelize import parallelize
from shardwright.runtime.collectives import comm
from shardwright.runtime.model.access import state_of
from tests.models.transformer import Transformer, TransformerConfig

TP, DP = 8, 128
RANKS = (0, 1, 7, 8, 1023)
CONFIG = TransformerConfig(vocab=64, seq=4, d=32, n_layer=1, n_head=8)


class Shapes(TorchDispatchMode):
    """Every shape that any op gives."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        actual = func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(actual):
            if isinstance(leaf, torch.Tensor):
                self.seen.add(tuple(leaf.shape))
        return actual


def run_rank(rank: int, directory: str) -> dict[str, Any]:
    """One step of a GPT as one of many ranks; what it sent, forward and backward, and what it holds."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=TP * DP)
    try:
        torch.manual_seed(0)
        idx = torch.randint(64, (2 * DP, 4))
        model = parallelize(
            Transformer(CONFIG), plan=f"dp={DP},tp={TP}", example=(idx, idx), compile={"directory": directory}
        )
        program = model._around["compiler"].programs[0]
        with comm.recording() as forward, Shapes() as shapes:
            loss = model(idx, idx)
        with comm.recording() as backward:
            loss.backward()
        holding = state_of(model)
        return {
            "forward": list(forward), "backward": list(backward), "shapes": shapes.seen, "program": program,
            "text": model.generated.read_text(), "loss": tuple(loss.shape), "world": dist.get_world_size(),
            "shards": {spec.name: tuple(holding.parameters[spec.name].shape) for spec in holding.specs},
            "gradients": {spec.name: tuple(holding.parameters[spec.name].grad.shape) for spec in holding.specs},
        }  # fmt: skip
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    directory = str(tmp_path_factory.mktemp("fake"))
    return {rank: run_rank(rank, directory) for rank in RANKS}


def test_the_order_of_collectives_is_the_same_on_every_rank(runs):
    first = runs[RANKS[0]]
    assert {axes for _, axes, _ in first["forward"]} >= {("tp",)}
    for rank in RANKS[1:]:
        assert runs[rank]["forward"] == first["forward"]
        assert runs[rank]["backward"] == first["backward"]


def test_a_block_sends_two_sums_forward_and_two_backward_over_tp(runs):
    activation = (2, CONFIG.seq, CONFIG.d)
    for direction in ("forward", "backward"):
        sums = [sent for sent in runs[0][direction] if sent == ("all_reduce", ("tp",), activation)]
        assert len(sums) >= 2 * CONFIG.n_layer
    assert not [sent for sent in runs[0]["forward"] if sent[0] in ("all_gather", "all_to_all")]


def test_all_ranks_run_one_file(runs):
    assert {run["text"] for run in runs.values()} == {runs[0]["text"]}
    assert all(run["world"] == TP * DP for run in runs.values())


@pytest.mark.parametrize("rank", RANKS)
def test_values_have_the_shapes_that_their_layouts_say(runs, rank):
    program, seen = runs[rank]["program"], runs[rank]["shapes"]
    sizes, at = program.mesh.sizes, dict(program.mesh.coordinates(rank))
    predicted = {
        name: program.layouts[name].local_shape(value.shape, sizes, at)
        for name, value in program.graph.values.items()
        if name in program.layouts and name in program.graph.producer
    }
    assert len(predicted) > 20
    constants = {name for name in predicted if not program.graph.values[name].gradient}
    assert {name: shape for name, shape in predicted.items() if name not in constants and shape not in seen} == {}
    assert (2, 8 // TP, CONFIG.seq, 4) in predicted.values()  # queries of this rank's head


@pytest.mark.parametrize("rank", RANKS)
def test_shards_and_gradients_have_their_local_shapes(runs, rank):
    program, shards = runs[rank]["program"], runs[rank]["shards"]
    sizes, at = program.mesh.sizes, dict(program.mesh.coordinates(rank))
    for parameter in program.parameters:
        if parameter.name in shards:
            whole = program.graph.values[parameter.value].shape
            assert shards[parameter.name] == parameter.layout.local_shape(whole, sizes, at)
            assert runs[rank]["gradients"][parameter.name] == shards[parameter.name]
    assert shards["blocks.0.attn.qkv.weight"] == (3 * 32 // TP, 32)
    assert shards["blocks.0.down.weight"] == (32, 128 // TP)


def test_the_comments_of_the_file_are_shapes_that_occur(runs):
    """Sizes in the file are symbols; with their values every commented shape is one that was seen."""
    text, seen = runs[0]["text"], runs[0]["shapes"]
    symbols = {m[1]: int(m[2]) for m in re.finditer(r"^(\w+) = (\d+)\b", text, re.M)}
    running = re.sub(r"    def constants.*?(?=\n    def )", "", text, flags=re.S)  # what is made once was not watched
    shown = re.findall(r"#\s+\[([^\]]+)\]", running)
    assert shown
    for shape in shown:
        value = eval(compile(ast.parse(f"({shape},)", mode="eval"), "", "eval"), {}, symbols)
        assert tuple(value) in seen, shape
