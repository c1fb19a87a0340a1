"""A run by the trainer is the run that a plain loop makes."""

import gc
import json
import sys
import weakref
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler

import shardwright as sw
from shardwright.errors import InputError
from shardwright.train import Callback, Checkpoints, EarlyStopping, LearningRateMonitor, LoaderOptions
from shardwright.verify import program

from .runs import by_hand, close, losses, net, parameters, rows, trainer


def half(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def test_a_run_is_that_of_a_plain_loop_also_in_parts_and_with_a_smaller_last_batch(tmp_path):
    wanted, values = by_hand(2, lambda _, model: nn.utils.clip_grad_norm_(model.parameters(), 0.5), half)

    training = trainer(tmp_path, micro_batch_size=4, clip_norm=0.5, scheduler=half)
    progress = training.fit()

    assert training.accumulate == 2
    assert (progress.step, progress.epoch, progress.rows) == (6, 2, 44)
    close(losses(training), wanted)
    close(parameters(training), values)


def test_gradients_are_clipped_by_value(tmp_path):
    _, values = by_hand(1, lambda _, model: nn.utils.clip_grad_value_(model.parameters(), 0.01))
    training = trainer(tmp_path, max_epochs=1, clip_value=0.01)
    training.fit()
    close(parameters(training), values)


def test_a_run_that_goes_on_in_the_middle_of_an_epoch_is_the_same_run(tmp_path):
    shared = {"model": net(dropout=0.3), "micro_batch_size": 4, "scheduler": half}
    whole = trainer(tmp_path / "whole", **{**shared, "model": net(dropout=0.3)}, max_steps=8)
    whole.fit()

    first = trainer(tmp_path / "two", **shared, max_steps=4)
    first.fit()
    second = trainer(tmp_path / "two", **{**shared, "model": net(dropout=0.3)}, max_steps=8, resume="last")
    second.fit()

    assert {**losses(first), **losses(second)} == losses(whole)
    assert all(torch.equal(value, parameters(whole)[key]) for key, value in parameters(second).items())
    assert second.progress == whole.progress


def test_an_epoch_that_was_saved_at_its_last_step_is_ended_after_a_resume(tmp_path):
    kept = Checkpoints(every=3, every_epochs=None, background=False)
    ends = []

    class Ends(Callback):
        def on_epoch_end(self, trainer, epoch):
            ends.append((trainer.progress.step, epoch))

    first = trainer(tmp_path, max_steps=3, checkpoints=kept, callbacks=[Ends()])
    first.fit()
    assert ends == []  # an epoch has 3 steps, and nobody has looked whether there is a fourth
    second = trainer(tmp_path, max_steps=4, checkpoints=kept, callbacks=[Ends()], resume="last")
    second.fit()
    assert ends == [(3, 0)]
    assert second.progress.epoch == 1


def test_the_best_is_kept_and_found(tmp_path):
    class Up(Callback):
        """Validation becomes worse and worse."""

        def before_log_val(self, trainer, metrics):
            metrics["val_loss"] += trainer.progress.step

    kept = Checkpoints(every=1, keep_last=1, keep_best=1, background=True)
    training = trainer(tmp_path, max_steps=5, val_data=rows(6), val_every=2, checkpoints=kept, callbacks=[Up()])
    training.fit()
    names = sorted(path.name for path in (tmp_path / "run/checkpoints").glob("step-*"))
    assert names == ["step-000002", "step-000005"]
    assert (training.progress.best_step, training.progress.step) == (2, 5)

    again = trainer(tmp_path, max_steps=3, val_data=rows(6), resume="best", checkpoints=kept)
    assert again.fit().step == 3
    assert list(losses(again)) == [3]


def test_validation_is_the_mean_over_all_rows(tmp_path):
    training = trainer(tmp_path, max_steps=3, val_data=rows(13))
    training.fit()
    model = net()
    model.load_state_dict(parameters(training))
    data = rows(13)
    wanted = F.mse_loss(model(torch.stack([x for x, _ in data])), torch.stack([y for _, y in data]))
    assert losses(training, "val_loss")[3] == pytest.approx(wanted.item(), abs=1e-12)
    alone = trainer(tmp_path, max_steps=3, val_data=rows(13), resume="last")
    assert alone.validate()["val_loss"] == pytest.approx(wanted.item(), abs=1e-12)


class Named(nn.Module):
    """Takes a dict, gives back a dict with more than a loss."""

    def __init__(self):
        super().__init__()
        self.inner = net()

    def forward(self, x, labels):
        out = self.inner(x)
        return {"out": out, "loss": F.mse_loss(out, labels), "size": out.abs().mean()}


def test_batches_and_outputs_may_be_dicts(tmp_path):
    data = [{"x": x, "labels": y} for x, y in rows()]
    training = trainer(tmp_path, model=Named(), train_data=data, max_epochs=1)
    training.fit()
    close(losses(training), by_hand(1)[0])
    assert losses(training, "size").keys() == {1, 2, 3}


@pytest.mark.parametrize("loss", [F.mse_loss, nn.MSELoss()])
def test_a_loss_is_joined_with_a_model_that_has_none(tmp_path, loss):
    training = trainer(tmp_path, loss=loss, max_epochs=1)
    training.fit()
    close(losses(training), by_hand(1)[0])
    assert set(parameters(training)) == set(net().state_dict())
    assert "mse_loss" in next((tmp_path / "run/generated").rglob("train_*.py")).read_text()


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(7, 8), nn.Linear(8, 7)

    def forward(self, ids, labels):
        return F.cross_entropy(self.head(self.table(ids)).flatten(0, 1), labels.flatten())


def test_reduced_by_tokens_a_step_in_parts_is_that_of_the_whole_batch(tmp_path):
    torch.manual_seed(0)
    ids = torch.randint(7, (8, 5))
    labels = torch.where(torch.rand(8, 5) < 0.4, -100, ids)
    data = list(zip(ids, labels, strict=True))
    options = {"train_data": data, "max_steps": 3, "seed": 1}
    torch.manual_seed(1)
    start = Words().double().state_dict()

    def run(name, **more):
        model = Words().double()
        model.load_state_dict(start)
        training = trainer(tmp_path / name, model=model, **options, **more)
        training.fit()
        return training

    whole, parts = run("whole"), run("parts", micro_batch_size=2, reduction="token")
    by_rows = run("per_replica", micro_batch_size=2)
    close(losses(parts), losses(whole))
    close(parameters(parts), parameters(whole))
    assert abs(losses(by_rows)[1] - losses(whole)[1]) > 1e-4  # rows have unequally many labels
    assert parts.progress.tokens == 3 * 8 * 5


class Streamed(IterableDataset):
    def __iter__(self):
        return iter(rows())


class Ordered(Dataset):
    def __len__(self):
        return 22

    def __getitem__(self, row):
        return rows()[row]


def test_a_stream_a_loader_and_a_sampler_give_the_same_run(tmp_path):
    options = {"max_epochs": 1, "loader": LoaderOptions(shuffle=False)}
    wanted = trainer(tmp_path / "rows", **options)
    wanted.fit()
    stream = trainer(tmp_path / "stream", train_data=Streamed(), **options)
    stream.fit()
    ready = trainer(tmp_path / "ready", train_data=DataLoader(Ordered(), 8), batch_size=None, **options)
    ready.fit()
    sampled = trainer(tmp_path / "sampled", train_data=Ordered(), sampler=SequentialSampler, **options)
    sampled.fit()
    assert losses(stream) == losses(ready) == losses(sampled) == losses(wanted)


def test_workers_fetch_ahead_and_the_run_is_the_same(tmp_path):
    wanted = trainer(tmp_path / "alone", max_epochs=1)
    wanted.fit()
    options = LoaderOptions(workers=1, prefetch=2, options={"timeout": 100})
    ahead = trainer(tmp_path / "ahead", max_epochs=1, loader=options)
    ahead.fit()
    assert losses(ahead) == losses(wanted)


def test_a_stream_goes_on_where_it_was(tmp_path):
    whole = trainer(tmp_path / "whole", train_data=Streamed(), max_steps=5)
    whole.fit()
    trainer(tmp_path / "two", train_data=Streamed(), max_steps=2).fit()
    second = trainer(tmp_path / "two", train_data=Streamed(), max_steps=5, resume="last")
    second.fit()
    assert losses(second) == {step: losses(whole)[step] for step in (3, 4, 5)}


class Worse(Callback):
    """Every validation is worse than the one before."""

    def before_log_val(self, trainer, metrics):
        metrics["val_loss"] = float(trainer.progress.step)


def test_early_stopping_ends_a_run_that_no_longer_gets_better(tmp_path):
    stopping = EarlyStopping(patience=2)
    training = trainer(tmp_path, max_steps=20, val_data=rows(4), val_every=1, callbacks=[Worse(), stopping])
    training.fit()
    assert training.progress.step == 3
    assert "stopped: val_loss has not improved on 1.0 in 2 validations" in (tmp_path / "run/finished").read_text()
    again = EarlyStopping(patience=2)
    trainer(tmp_path, max_steps=4, val_data=rows(4), callbacks=[Worse(), again], resume="last").fit()
    assert (again.best, again.waited) == (1.0, 3)


def test_a_run_that_is_asked_to_stop_saves_and_ends(tmp_path):
    class Asks(Callback):
        def on_step_start(self, trainer, step):
            if step == 3:
                trainer.stop("enough")

    training = trainer(tmp_path, max_steps=20, callbacks=[Asks()])
    training.fit()
    assert training.progress.step == 3
    assert (tmp_path / "run/checkpoints/latest").read_text().strip() == "step-000003"


def test_learning_rates_are_logged_as_the_step_had_them(tmp_path):
    training = trainer(tmp_path, max_steps=4, scheduler=half, callbacks=[LearningRateMonitor(momentum=True)])
    training.fit()
    assert losses(training, "lr") == losses(training, "lr_0") == {1: 0.01, 2: 0.01, 3: 0.005, 4: 0.005}
    assert losses(training, "momentum_0")[1] == 0.9


def test_a_schedule_by_epochs_and_one_by_validation(tmp_path):
    def tenth(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)

    training = trainer(tmp_path / "a", max_epochs=3, scheduler=tenth, scheduler_every="epoch")
    training.fit()
    assert [round(value, 6) for value in losses(training, "lr").values()] == [0.01] * 3 + [0.001] * 3 + [0.0001] * 3

    plateau = trainer(
        tmp_path / "b", max_steps=4, val_data=rows(4), val_every=1, callbacks=[Worse()],
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    )  # fmt: skip
    plateau.fit()
    assert losses(plateau, "lr")[4] == pytest.approx(0.01 * 0.1**2)


def test_a_run_begins_with_ordinary_weights(tmp_path):
    from shardwright.checkpoint import save_weights

    other = net()
    with torch.no_grad():
        other.down.bias.fill_(2.0)
    save_weights(tmp_path / "start.safetensors", other)
    training = trainer(tmp_path, max_steps=1, weights=tmp_path / "start.safetensors")
    training.fit()
    assert abs(losses(training)[1] - by_hand(1)[0][1]) > 1.0


def test_compiled_alone_a_run_writes_plan_and_code_for_ranks_that_are_not_here(tmp_path):
    training = trainer(tmp_path, max_steps=1, plan="dp=2,tp=2")
    plan = training.compile()
    assert plan.size == 4
    assert json.loads((tmp_path / "run/plan.json").read_text())["mesh"] == {"dp": 2, "tp": 2}
    assert "self.tp" in next((tmp_path / "run/generated").rglob("train_*.py")).read_text()
    assert not (tmp_path / "run/checkpoints").exists()


def test_compiled_alone_a_model_is_captured_once(tmp_path):
    door = sys.modules["shardwright.parallelize"]  # the package has a function of that name
    with mock.patch.object(door, "capture", wraps=door.capture) as once, mock.patch.object(program, "capture") as never:
        trainer(tmp_path, max_steps=1, plan="dp=2").compile()
    assert once.call_count == 1 and not never.called


def test_compiled_alone_a_run_is_refused_for_what_it_would_be_refused_for(tmp_path):
    with pytest.raises(InputError, match=r"'\*\.weigth' matches no parameter"):
        trainer(tmp_path, max_steps=1, plan="dp=2", parameter_groups=[{"match": "*.weigth", "lr": 0.1}]).compile()
    with pytest.raises(InputError, match=r'pipeline\.semantics="local" is compiled by the ranks'):
        trainer(tmp_path, max_steps=1, plan="pp=2", microbatches=2, microbatch_semantics="local").compile()


def test_the_original_is_let_go_when_it_is_compiled(tmp_path):
    training = trainer(tmp_path, max_steps=1, loss=F.mse_loss)
    stored = weakref.ref(training.original.up.weight)
    training.fit()
    gc.collect()
    assert stored() is None


def test_sizes_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(
        InputError, match=r"batch_size=8 is not a multiple of the call size with optimization\.micro_batch_size=3"
    ):
        trainer(tmp_path, micro_batch_size=3)
    with pytest.raises(InputError, match="set the global batch size"):
        trainer(tmp_path, batch_size=None)
    with pytest.raises(InputError, match=r"max_steps=0 makes no sense"):
        trainer(tmp_path, max_steps=0)
    with pytest.raises(InputError, match=r"optimization\.clip_norm=-1.0 would leave nothing"):
        trainer(tmp_path, clip_norm=-1.0)
    with pytest.raises(InputError, match=r"(?s)reduction='tokens' is not known; use .*\"token\""):
        trainer(tmp_path, reduction="tokens")
    with pytest.raises(InputError, match="yields batches already"):
        trainer(tmp_path, train_data=DataLoader(rows(), 4))
    with pytest.raises(InputError, match="is empty"):
        trainer(tmp_path, train_data=[]).fit()


def test_a_model_without_a_loss_is_told_what_to_do(tmp_path):
    with pytest.raises(InputError, match=r"returns .*no loss.*loss=torch.nn.functional"):
        trainer(tmp_path, train_data=[x for x, _ in rows()], outputs="all").fit()


def test_the_trainer_is_public():
    assert sw.Trainer is trainer.__globals__["Trainer"]


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, prior, x):
        return (self.linear(x) * prior).square().mean()


def test_rows_are_not_counted_by_an_input_that_has_no_batch_dim(tmp_path):
    def collate(batch):
        return {"prior": torch.ones(3), "x": torch.stack(batch)}

    data = DataLoader(list(torch.randn(10, 4)), batch_size=5, collate_fn=collate)
    built = sw.Trainer(
        model=Weighted(),
        train_data=data,
        plan="single",
        directory=tmp_path,
        max_epochs=1,
        compile=sw.CompileOptions(unbatched=["prior"]),
    )
    assert built.fit().rows == 10
