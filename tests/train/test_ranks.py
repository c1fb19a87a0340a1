"""Runs on two ranks are the run on one device, and a run may go on with other ranks than it had."""

import json

import pytest
import torch
import torch.nn.functional as F

from shardwright.train import Callback, Checkpoints

from .runs import by_hand, close, losses, parameters, rows, trainer


def run(rank, folder, more):
    training = trainer(folder, **more)
    training.fit()
    return losses(training), parameters(training), training.progress.state_dict()


@pytest.mark.parametrize(
    ("plan", "inputs"),
    [
        ("dp=2", "global"),
        ("tp=2", "global"),
        ("zero3=2", "global"),
        ("pp=2", "global"),
        ("zero2=2", "per_replica"),
        ("dp=2", "per_replica"),
    ],
)
def test_two_ranks_train_as_one_device_does(plan, inputs, tmp_path, pools):
    def clip(step, model):
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.02)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    wanted, values = by_hand(2, clip)
    more = {"clip_value": 0.02, "clip_norm": 0.1, "micro_batch_size": 4, "loss": F.mse_loss}
    more |= {"plan": plan, "inputs": inputs}
    (actual, stored, progress), (other, _, same) = pools[2].run(run, tmp_path, more)

    close(actual, wanted)
    close(stored, values)
    assert other == {}  # the first rank logs
    assert progress == same
    assert progress["rows"] == 44


def test_a_last_batch_that_groups_cannot_share_evenly_is_exact_too(tmp_path, pools):
    alone = trainer(tmp_path / "alone", train_data=rows(19), val_data=rows(5), micro_batch_size=4)
    alone.fit()
    more = {"plan": "dp=2", "inputs": "per_replica", "train_data": rows(19), "val_data": rows(5), "micro_batch_size": 4}
    actual, stored, progress = pools[2].run(run, tmp_path / "two", more)[0]
    close(actual, losses(alone))
    close(stored, parameters(alone))
    assert progress["rows"] == 38
    assert progress["best"] == pytest.approx(alone.progress.best, abs=1e-12)


def test_a_run_goes_on_with_fewer_and_with_more_ranks(tmp_path, pools):
    wanted, values = by_hand(3)
    pools[2].run(run, tmp_path, {"plan": "zero3=2", "max_steps": 4, "inputs": "per_replica", "val_data": rows(5)})
    alone = trainer(tmp_path, max_steps=7, resume="last")
    alone.fit()
    actual, stored, _ = pools[2].run(run, tmp_path, {"plan": "tp=2", "max_epochs": 3, "resume": "last"})[0]

    close(losses(alone), {step: wanted[step] for step in (5, 6, 7)})
    close(actual, {step: wanted[step] for step in (8, 9)})
    close(stored, values)
    assert json.loads((tmp_path / "run/plan.json").read_text())["mesh"] == {"tp": 2}
    assert json.loads((tmp_path / "run/plan-until-000004.json").read_text())["mesh"] == {"dp": 2}


class OneAsks(Callback):
    """Only the second rank is asked to stop, as by a signal."""

    def on_step_start(self, trainer, step):
        if step == 2 and trainer.world.rank == 1:
            trainer.stop("a signal on rank 1")


def stopped(rank, folder):
    training = trainer(folder, plan="dp=2", max_steps=50, callbacks=[OneAsks()], checkpoints=Checkpoints())
    return training.fit().step


def test_one_rank_that_is_asked_to_stop_stops_all_after_the_same_step(tmp_path, pools):
    assert pools[2].run(stopped, tmp_path) == [2, 2]
    assert (tmp_path / "run/finished").read_text() == "at step 2, stopped: a signal on rank 1\n"
    assert (tmp_path / "run/checkpoints/latest").read_text() == "step-000002\n"


def tokens(rank, folder):
    from .test_trainer import Words

    torch.manual_seed(0)
    ids = torch.randint(7, (8, 5))
    labels = torch.where(torch.rand(8, 5) < 0.4, -100, ids)
    model = Words().double()
    training = trainer(
        folder, model=model, train_data=list(zip(ids, labels, strict=True)), max_steps=2, micro_batch_size=4,
        plan="dp=2", inputs="per_replica", reduction="token", val_data=list(zip(ids, labels, strict=True)),
    )  # fmt: skip
    training.fit()
    model = Words().double()
    model.load_state_dict(parameters(training))
    return losses(training, "val_loss"), model(ids, labels).item(), training.progress.tokens


def test_tokens_are_counted_over_groups_that_load_rows_of_their_own(tmp_path, pools):
    actual, wanted, seen = pools[2].run(tokens, tmp_path)[0]
    assert actual[2] == pytest.approx(wanted, abs=1e-12)
    assert seen == 2 * 8 * 5


def refused(rank, folder):
    try:
        trainer(folder, plan="dp=2", max_steps=1).fit()
    except Exception as error:
        return str(error)
    return ""


def test_a_folder_that_holds_a_run_is_refused_by_all_ranks(tmp_path, pools):
    trainer(tmp_path, max_steps=1).fit()
    for message in pools[2].run(refused, tmp_path):
        assert "contains a run that has ended: at step 1" in message
        assert 'resume="last"' in message
