"""Captures are kept for what is the same, and for nothing else."""

import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.compile import copy_to_meta

from .captures import captured


class Scaled(nn.Module):
    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)
        self.factor, self.shift = factor, torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.linear(x) * self.factor + self.shift)


def of(module: nn.Module, rows: int = 2, entry: str = "train"):
    return captured(copy_to_meta(module), (torch.zeros(rows, 4),), {}, entry=entry, real=None)


def test_the_same_is_captured_once():
    assert of(Scaled()) is of(Scaled())


def test_what_a_module_holds_how_it_is_set_and_how_it_is_called_make_a_difference():
    first, frozen, shifted = Scaled(), Scaled(), Scaled()
    frozen.linear.bias.requires_grad_(False)
    shifted.shift[1] = 3.0
    others = [
        of(Scaled(3.0)),
        of(Scaled().eval()),
        of(Scaled().double()),
        of(frozen),
        of(shifted),
        of(Scaled(), rows=4),
    ]
    with torch.no_grad():
        others.append(of(Scaled()))
    with torch.autocast("cpu", torch.bfloat16):
        others.append(of(Scaled()))
    assert len({id(value) for value in (of(first), *others)}) == 9


def test_opaque_parts_and_what_can_not_be_pickled_are_captured_every_time():
    class Local(Scaled):
        pass

    def opaque():
        module = Scaled()
        module.linear = sw.opaque(module.linear)
        return module

    assert of(Local()) is not of(Local())
    assert of(opaque()) is not of(opaque())
