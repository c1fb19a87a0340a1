"""Fewer layers: a few of each kind, at their places, under new numbers."""

import torch
from torch import nn

from shardwright.capture import capture
from shardwright.ir import check
from shardwright.rehearse.layers import Decided, drop_layers


class Block(nn.Module):
    def __init__(self, wide=False):
        super().__init__()
        self.up = nn.Linear(8, 16 if wide else 12)
        self.down = nn.Linear(16 if wide else 12, 8)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Stack(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.stem = nn.Linear(8, 8)  # without it the first block would be of another kind: its input has no gradient
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x.mean()


def shortened(blocks, recompute=(), stage=lambda name: 0, module=Stack):
    graph = capture(module(blocks), (torch.randn(4, 8),), {}, entry="train").graph
    decided = Decided(
        graph=graph, choices={}, stage={op.name: stage(op.name) for op in graph.ops}, storage={},
        recompute=tuple((path, 0) for path in recompute),
    )  # fmt: skip
    small, kept, rename = drop_layers(decided)
    check(small.graph)
    return small, kept, rename


def test_the_first_two_and_the_last_of_a_run_are_kept():
    small, kept, rename = shortened([Block() for _ in range(9)])

    assert [layers.kept for layers in kept] == [(0, 1, 8)]
    assert {key.rpartition(".")[0] for p in small.graph.parameters for key in p.keys} == {"stem"} | {
        f"blocks.{number}.{part}" for number in range(3) for part in ("up", "down")
    }
    assert rename("blocks.8.up / linear") == "blocks.2.up / linear"


def test_layers_of_other_shapes_are_other_kinds_and_keep_their_order():
    small, kept, _ = shortened([Block(wide=number % 2 == 1) for number in range(10)])

    assert [layers.kept for layers in kept] == [(0, 1, 2, 3, 8, 9)]
    widths = [small.graph.values[p.value].shape[0] for p in small.graph.parameters if p.key.endswith("up.weight")]
    assert widths == [12, 16] * 3


def test_layers_that_are_recomputed_are_a_kind_of_their_own():
    small, kept, _ = shortened([Block() for _ in range(10)], recompute=[f"blocks.{at}" for at in range(5)])

    assert [layers.kept for layers in kept] == [(0, 1, 4, 5, 6, 9)]
    assert [path for path, _ in small.recompute] == ["blocks.0", "blocks.1", "blocks.2"]


def test_layers_of_another_stage_are_a_kind_of_their_own():
    def stage(name):
        return int(name.split(".")[1].split()[0]) // 4 if name.startswith("blocks") else 1

    small, kept, _ = shortened([Block() for _ in range(8)], stage=stage)

    assert [layers.kept for layers in kept] == [(0, 1, 3, 4, 5, 7)]
    assert [small.stage[f"blocks.{at}.up / linear"] for at in range(6)] == [0, 0, 0, 1, 1, 1]


def test_what_was_read_of_a_layer_that_is_gone_is_read_of_one_of_its_kind():
    class Skips(Stack):
        """Every layer's output is read at the end, the last first."""

        def forward(self, x):
            x, outputs = self.stem(x), []
            for block in self.blocks:
                x = block(x)
                outputs.append(x)
            for output in reversed(outputs):
                x = x * 0.5 + output
            return x.mean()

    small, kept, _ = shortened([Block() for _ in range(8)], module=Skips)

    assert [layers.kept for layers in kept] == [(0, 1, 7)]
    values = {name for op in small.graph.ops for name in op.outputs}
    assert all(name in values or name in {p.value for p in small.graph.parameters} or name == "x"
               for op in small.graph.ops for name in op.inputs)  # fmt: skip


def test_lists_in_lists_are_shortened_too():
    class Stages(nn.Module):
        def __init__(self):
            super().__init__()
            self.stages = nn.ModuleList(Stack([Block() for _ in range(6)]) for _ in range(2))

        def forward(self, x):
            for stage in self.stages:
                x = stage.stem(x)
                for block in stage.blocks:
                    x = block(x)
            return x.mean()

    small, kept, _ = shortened(None, module=lambda _: Stages())

    assert [(layers.path, layers.kept) for layers in kept] == [
        ("stages.0.blocks", (0, 1, 5)), ("stages.1.blocks", (0, 1, 5)),
    ]  # fmt: skip
    assert "stages.1.blocks.2.down / linear" in small.graph.by_name


def test_a_layer_whose_weight_is_read_elsewhere_stays():
    class Tied(Stack):
        def forward(self, x):
            x = self.stem(x)
            for block in self.blocks:
                x = block(x)
            return x.mean() + self.blocks[3].up.weight.square().sum()

    _, kept, _ = shortened([Block() for _ in range(8)], module=Tied)

    assert [layers.kept for layers in kept] == [(0, 1, 3, 7)]
