"""Callbacks for faults, on one rank and on two."""

import os
import signal

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.errors import DriftError, InputError, NonFiniteError
from shardwright.runtime.faults import signals
from shardwright.train import Callback, CheckReplicas, NonFinite, StopOnSignal

from .runs import by_hand, close, losses, parameters, rows, trainer


class Poison(Callback):
    """Makes something wrong before a step, on one rank or on all."""

    def __init__(self, step, act, rank=None):
        self.step, self.act, self.rank = step, act, rank

    def on_step_start(self, trainer, step):
        if step == self.step and self.rank in (None, trainer.world.rank):
            with torch.no_grad():
                self.act(trainer)


class Log(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8, bias=False)

    def forward(self, x, y):
        return (self.up(x).square() + y.abs()).log().mean()


def with_a_zero(at):
    data = rows(16)
    x, y = data[at]
    data[at] = (torch.zeros_like(x), torch.zeros_like(y))
    return data


@pytest.mark.parametrize("gradients", [False, True])
def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_op(tmp_path, gradients):
    training = trainer(
        tmp_path, model=Log().double(), train_data=with_a_zero(3), callbacks=[NonFinite(gradients=gradients)],
    )  # fmt: skip
    with pytest.raises(
        NonFiniteError, match=r"step \d, batch 0: the step is not finite; .*forward of log at .*test_faults"
    ):
        training.fit()


def test_a_warning_goes_on(tmp_path):
    training = trainer(
        tmp_path, model=Log().double(), train_data=with_a_zero(3), max_steps=2, checkpoints=False,
        callbacks=[NonFinite("warn")],
    )  # fmt: skip
    with pytest.warns(UserWarning, match="forward of log"):
        training.fit()
    assert training.progress.step == 2


def test_checks_of_a_good_run_change_nothing(tmp_path):
    wanted, values = by_hand(2)
    training = trainer(tmp_path, callbacks=[NonFinite(gradients=True), CheckReplicas(every=1)])
    training.fit()
    close(losses(training), wanted)
    close(parameters(training), values)


def test_settings_that_make_no_sense():
    for make, words in (
        (lambda: NonFinite("shout"), 'use "raise" or "warn"'),
        (lambda: NonFinite(every=0), "at least 1 step"),
        (lambda: CheckReplicas(every=0), "at least 1 step"),
        (lambda: StopOnSignal(["SIGNOTHING"]).on_train_start(None), "SIGNOTHING: not a signal"),
    ):
        with pytest.raises(InputError, match=words):
            make()


# -- signals --------------------------------------------------------------------------------------


def send(name):
    return lambda trainer: os.kill(os.getpid(), getattr(signal, name))


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_a_signal_saves_and_ends_and_the_run_goes_on_later(tmp_path, name):
    wanted, values = by_hand(2)
    before = signal.getsignal(getattr(signal, name))
    training = trainer(tmp_path, callbacks=[Poison(2, send(name))])
    assert training.fit().step == 2
    assert (tmp_path / "run/finished").read_text() == f"at step 2, stopped: {name} on rank 0\n"
    assert signal.getsignal(getattr(signal, name)) == before
    again = trainer(tmp_path, resume="last")
    again.fit()
    close({**losses(training), **losses(again)}, wanted)
    close(parameters(again), values)


def test_a_second_sigterm_is_at_once_but_not_a_double_of_the_first(monkeypatch):
    ended = []
    monkeypatch.setattr(signals.os, "kill", lambda *what: ended.append(what))
    with signals.StopSignals(["SIGTERM"]) as stop_signals:
        stop_signals._come(signal.SIGTERM, None)
        stop_signals._come(signal.SIGTERM, None)
        assert stop_signals.received == "SIGTERM" and not ended
        stop_signals._when -= signals.PAUSES[signal.SIGTERM] + 1
        stop_signals._come(signal.SIGTERM, None)
        assert ended == [(os.getpid(), signal.SIGTERM)]


def test_a_second_ctrl_c_aborts_in_the_middle_of_a_step():
    with signals.StopSignals() as stop_signals:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # as when a terminal and a launcher both send it
        assert stop_signals.received == "SIGINT"
        stop_signals._when -= signals.PAUSES[signal.SIGINT] + 1
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def loop(rank, folder):
    """An ordinary loop; the second rank gets the signal in the third step."""
    torch.manual_seed(0)
    model = sw.parallelize(nn.Linear(4, 4), plan="dp=2", example=torch.zeros(4, 4), compile={"directory": folder})
    done = 0
    with signals.StopSignals() as stop_signals:
        for step in range(10):
            model(torch.ones(4, 4)).sum().backward()
            if step == 2 and rank == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            done += 1
            if stop_signals.agreed():
                break
    return done, stop_signals.received


def fit(rank, folder, act, where, more):
    training = trainer(folder, plan="dp=2", callbacks=[Poison(2, act, where), *more])
    try:
        training.fit()
    except DriftError as error:
        return str(error)
    return training.progress.step


def usr1(trainer):
    os.kill(os.getpid(), signal.SIGUSR1)


def drift(trainer):
    trainer.model.down.weight[1, 2] += 1e-9


def fit_rows(rank, folder, more):
    training = trainer(folder, train_data=rows(21), plan="dp=2", inputs="per_replica", val_data=rows(5), **more)
    training.fit()
    return losses(training), losses(training, "val_loss"), parameters(training)


@pytest.mark.parametrize("more", [{"batch_size": 8}, {"micro_batch_size": 4, "accumulate": 2}])
def test_a_last_batch_that_groups_can_not_share_is_exact(tmp_path, pools, more):
    alone = trainer(tmp_path / "one", train_data=rows(21), val_data=rows(5), **more)
    alone.fit()
    actual, validated, values = pools[2].run(fit_rows, tmp_path / "two", more)[0]
    close(actual, losses(alone))
    close(validated, losses(alone, "val_loss"))
    close(values, parameters(alone))


def test_two_ranks(tmp_path, pools):
    assert pools[2].run(loop, tmp_path / "loop") == [(3, ""), (3, "SIGUSR1")]
    assert pools[2].run(fit, tmp_path / "one", usr1, 1, []) == [2, 2]
    assert "stopped: SIGUSR1 on rank 1" in (tmp_path / "one/run/finished").read_text()
    (message,) = set(pools[2].run(fit, tmp_path / "two", drift, 1, [CheckReplicas(every=2)]))
    assert "after step 2" in message and "down.weight has other values on rank 1 than on rank 0" in message
