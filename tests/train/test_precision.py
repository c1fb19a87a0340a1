"""Runs in other precisions: what is passed on, and losses that are scaled."""

import math

import pytest
import torch

from shardwright.train import Callback

from .runs import losses, parameters, rows, trainer


def data():
    return [(x.float(), y.float()) for x, y in rows()]


def run(folder, **more):
    torch.manual_seed(3)
    from .runs import Net

    training = trainer(folder, model=Net(), train_data=data(), **{"max_steps": 4, **more})
    training.fit()
    return training


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16", "fp16"])
def test_a_run_in_a_narrow_dtype_is_close_to_one_in_float32(precision, tmp_path):
    exact, narrow = run(tmp_path / "a"), run(tmp_path / "b", precision=precision)
    assert losses(narrow) != losses(exact)
    assert losses(narrow)[4] == pytest.approx(losses(exact)[4], rel=0.03)
    assert (narrow.scale is not None) == (precision == "fp16")
    assert all(value.dtype == torch.float32 for value in parameters(narrow).values())  # or of their masters


def test_a_scaled_loss_gives_the_same_updates(tmp_path):
    results = run(tmp_path / "a", precision="fp16-mixed", loss_scale=1.0)
    many = run(tmp_path / "b", precision="fp16-mixed", loss_scale=1024.0, clip_norm=1.0)
    assert losses(many, "loss_scale")[4] == 1024.0
    assert losses(many)[4] == pytest.approx(losses(results)[4], rel=1e-3)
    assert losses(many, "grad_norm")[1] < 10.0  # of gradients that are scaled down again


class Breaks(Callback):
    """The second rank finds an infinite gradient in the second step."""

    def after_sync(self, trainer):
        if trainer.progress.step == 1 and trainer.world.rank == trainer.world.size - 1:
            next(trainer.model.parameters()).grad.fill_(math.inf)


class Keeps(Callback):
    def __init__(self):
        self.seen = []

    def after_optimizer_step(self, trainer):
        self.seen.append(trainer.model.full_state_dict()["up.weight"].clone())


def broken(rank, folder, plan):
    kept = Keeps()
    results = run(folder, plan=plan, precision="fp16-mixed", callbacks=[Breaks(), kept], max_steps=3)
    return [
        float((a - b).abs().max()) for a, b in zip(kept.seen, kept.seen[1:], strict=False)
    ], results.scale.state_dict()


@pytest.mark.parametrize("plan", ["tp=2", "pp=2", "zero2=2"])
def test_what_is_not_finite_on_one_rank_is_left_out_on_all(plan, tmp_path, pools):
    for moved, scale in pools[2].run(broken, tmp_path, plan):
        assert moved[0] == 0.0 and moved[1] > 0.0
        assert scale == {"scale": 2.0**15, "good": 1, "skipped": 1}


def test_the_scale_is_in_checkpoints(tmp_path):
    run(tmp_path, precision="fp16-mixed", callbacks=[Breaks()], max_steps=2)
    again = run(tmp_path, precision="fp16-mixed", max_steps=3, resume="last")
    assert again.scale.state_dict() == {"scale": 2.0**15, "good": 1, "skipped": 1}


def test_compiled_alone_a_run_has_its_precision(tmp_path):
    training = trainer(tmp_path, train_data=data(), model=torch.nn.Linear(8, 8), loss=torch.nn.functional.mse_loss,
                   max_steps=1, plan="dp=4", precision="bf16-mixed")  # fmt: skip
    training.compile()
    text = next((tmp_path / "run/generated").rglob("train_*.py")).read_text()
    assert "bfloat16" in text
