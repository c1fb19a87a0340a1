"""Measured steps: which of them count, that nothing waits for a device, and what `explain` shows of them."""

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.errors import InputError
from shardwright.runtime import accelerator
from shardwright.runtime.model.step_times import RECENT, WARM_UP, StepTimes

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    """A list whose last number is the time."""
    moments = [0.0]
    monkeypatch.setattr(accelerator, "mark", lambda device: moments[-1])
    return moments


def steps(times: StepTimes, clock: list[float], *lengths: float, program: str = "train") -> None:
    """Calls that so much time passes after."""
    for length in lengths:
        times.begin(program)
        clock.append(clock[-1] + length)


def test_warm_up_does_not_count(clock):
    times = StepTimes(CPU)
    steps(times, clock, *[9.0] * WARM_UP)
    assert times.seconds is None
    steps(times, clock, 1.0, 2.0, 4.0, 0.0)
    assert (times.count, times.seconds) == (3, 2.0)


def test_recent_steps_count(clock):
    times = StepTimes(CPU)
    steps(times, clock, *[9.0] * (WARM_UP + RECENT), *[1.0] * RECENT, 0.0)
    assert (times.count, times.seconds) == (RECENT, 1.0)


def test_a_step_in_which_something_else_ran_does_not_count(clock):
    times = StepTimes(CPU)
    steps(times, clock, *[1.0] * (WARM_UP + 2), 100.0)
    times.interrupt()
    steps(times, clock, 1.0, 0.0)
    assert (times.count, times.seconds) == (3, 1.0)


def test_another_program_begins_anew(clock):
    times = StepTimes(CPU)
    steps(times, clock, *[1.0] * 10)
    steps(times, clock, *[5.0] * (WARM_UP + 2), program="longer")
    assert (times.count, times.seconds) == (1, 5.0)


def test_gradient_accumulation_has_several_calls_in_a_step(clock):
    times = StepTimes(CPU, calls=3)
    steps(times, clock, *[1.0, 1.0, 4.0] * (WARM_UP + 3))
    assert (times.count, times.seconds) == (2, 6.0)


def test_marks_are_read_when_the_device_has_passed_them(monkeypatch):
    """Nothing waits: a step whose end the device has not reached is not there yet."""
    marks = iter(range(100))
    passed = []
    monkeypatch.setattr(accelerator, "mark", lambda device: next(marks))
    monkeypatch.setattr(accelerator, "seconds_between", lambda a, b: 1.0 if b in passed else None)
    times = StepTimes(CPU)
    for _ in range(WARM_UP + 4):
        times.begin("train")
    assert times.seconds is None
    passed += range(WARM_UP + 2)
    assert times.count == 1
    passed += range(100)
    assert times.count == 3


def test_explain_shows_measured_beside_predicted(tmp_path):
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = sw.parallelize(model, optimizer, cluster="cpu", compile={"directory": tmp_path})
    with pytest.raises(InputError, match="not compiled yet"):
        sw.explain(model)
    for _ in range(WARM_UP + 3):
        optimizer.zero_grad()
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
    with torch.no_grad():
        model(torch.ones(4, 8))
    screen = str(sw.explain(model))
    seconds = model.step_times.seconds
    assert 0 < seconds < 60
    assert "predicted step time" in screen
    assert "measured step time" in screen and "median of 2 steps on this rank" in screen
    assert ("too fast" if model.plan.predicted["train"]["seconds"] < seconds else "too slow") in screen
    assert "measured" not in str(sw.explain(model.plan))
