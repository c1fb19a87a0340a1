"""Python values as JSON: what comes back is what went in, and nothing else can be in it."""

from __future__ import annotations

import json
import math
from collections import Counter

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.checkpoint.encoding import decode, encode, keys_of
from shardwright.errors import CheckpointError, InputError

SINGLE = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
HASHABLE = st.integers() | st.text() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    SINGLE,
    lambda value: (
        st.lists(value)
        | st.dictionaries(HASHABLE, value)
        | st.lists(value).map(tuple)
        | st.dictionaries(st.sampled_from(["$", "key", "a"]), value)
    ),
)


def there_and_back(value):
    tensors = {}
    text = json.dumps(encode(value, "x", tensors), allow_nan=False)
    return decode(json.loads(text), tensors.__getitem__)


@given(VALUES)
def test_what_comes_back_is_what_went_in(value):
    actual = there_and_back(value)
    assert actual == value and repr(actual) == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        math.inf, -math.inf, {1, 2}, frozenset("ab"), Counter({3: 1, 7: 2}), 1 + 2j, torch.bfloat16,
        torch.device("cuda:1"), numpy.float32(1.5), numpy.int64(7), bytearray(b"ab"), torch.Size([2, 3]),
    ],
)  # fmt: skip
def test_what_json_has_no_word_for(value):
    assert there_and_back({"a": [value]})["a"][0] == value


def test_dicts_of_strings_are_plain_and_counters_stay_counters():
    assert encode({"a": {"b": 1}}, "x", {}) == {"a": {"b": 1}}
    assert encode({"$": 1}, "x", {}) == {"$": "dict", "items": [["$", 1]]}
    assert type(there_and_back(Counter({"a": 2}))) is Counter
    assert type(there_and_back({"a": 2})) is dict


def test_nan_and_arrays():
    assert math.isnan(there_and_back([math.nan])[0])
    assert numpy.array_equal(there_and_back(numpy.arange(6).reshape(2, 3)), numpy.arange(6).reshape(2, 3))


def test_tensors_are_kept_aside_under_their_paths():
    tensors = {}
    stored = encode({"a": [torch.ones(2), {"b": torch.zeros(1)}], "a/0": torch.ones(3)}, "x", tensors)
    assert list(tensors) == keys_of(stored) == ["x/a/0", "x/a/1/b", "x/a/0#2"]
    assert torch.equal(decode(stored, tensors.__getitem__)["a/0"], torch.ones(3))


@pytest.mark.parametrize("value", [object(), lambda: 1, print, Exception("x"), type])
def test_objects_are_refused_with_their_place(value):
    with pytest.raises(InputError, match=r"x/a/0 is a .*, which a checkpoint can't store"):
        encode({"a": [value]}, "x", {})


def test_unknown_kinds_and_dtypes_are_refused():
    with pytest.raises(CheckpointError, match="kind 'pickle'"):
        decode({"$": "pickle", "items": []}, {}.__getitem__)
    with pytest.raises(CheckpointError, match="not a dtype"):
        decode({"$": "dtype", "name": "load"}, {}.__getitem__)


def schedulers(optimizer):
    s = torch.optim.lr_scheduler
    yield s.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
    yield s.MultiplicativeLR(optimizer, lambda epoch: 0.9)
    yield s.StepLR(optimizer, 2)
    yield s.MultiStepLR(optimizer, [2, 4])
    yield s.ConstantLR(optimizer)
    yield s.LinearLR(optimizer)
    yield s.ExponentialLR(optimizer, 0.9)
    yield s.PolynomialLR(optimizer)
    yield s.CosineAnnealingLR(optimizer, 5)
    yield s.CosineAnnealingWarmRestarts(optimizer, 3)
    yield s.CyclicLR(optimizer, 0.01, 0.1)
    yield s.OneCycleLR(optimizer, 0.1, total_steps=20)
    yield s.ReduceLROnPlateau(optimizer)
    yield s.SequentialLR(optimizer, [s.ConstantLR(optimizer), s.ExponentialLR(optimizer, 0.9)], [2])
    yield s.ChainedScheduler([s.ConstantLR(optimizer), s.ExponentialLR(optimizer, 0.9)])


@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")
def test_the_schedulers_of_torch():
    def optimizer():
        return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)

    count = 0
    for number in range(15):
        first, second = (list(zip(range(number + 1), schedulers(optimizer()), strict=False))[-1][1] for _ in range(2))
        for _ in range(3):
            first.step(*([1.0] if isinstance(first, torch.optim.lr_scheduler.ReduceLROnPlateau) else []))
        second.load_state_dict(there_and_back(first.state_dict()))
        assert repr(second.state_dict()) == repr(first.state_dict())
        count += 1
    assert count == 15
