"""Specializations are dropped when there are too many, those in use last, and compiled again when they are called."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.errors import InputError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x):
        return self.up(x).square().mean()


def compiled(size):
    torch.manual_seed(0)
    return sw.parallelize(Net(), plan="single", compile=sw.CompileOptions(cache_size=size))


def gradient(model, rows):
    model.zero_grad()
    model(torch.ones(rows, 4)).backward()
    return next(iter(model.parameters())).grad.clone()


def test_the_one_unused_for_longest_is_dropped_and_freed():
    model = compiled(2)
    model(torch.ones(1, 4))
    first = weakref.ref(model._entries.newest.stage)
    model(torch.ones(2, 4))
    second = weakref.ref(model._entries.newest.stage)
    model(torch.ones(1, 4))
    with pytest.warns(UserWarning, match="more than 2 ways"):
        model(torch.ones(3, 4))
    gc.collect()
    assert first() is not None
    assert second() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.ones(4, 4))


@pytest.mark.filterwarnings("ignore:the model was called")
def test_a_dropped_one_that_is_called_again_computes_the_same():
    many, few = compiled(64), compiled(2)
    for rows in (1, 2, 3, 1, 4, 2, 1):
        assert torch.equal(gradient(many, rows), gradient(few, rows))


@pytest.mark.filterwarnings("ignore:the model was called")
def test_a_graph_outlives_its_specialization():
    model = compiled(2)
    loss = model(torch.ones(5, 4))
    for rows in (1, 2, 3):
        model(torch.ones(rows, 4))
    model.zero_grad()
    loss.backward()
    actual = next(iter(model.parameters())).grad.clone()
    assert torch.equal(actual, gradient(compiled(64), 5))


def test_too_small_a_cache_is_refused():
    with pytest.raises(InputError, match="cache_size=1"):
        sw.CompileOptions(cache_size=1)
