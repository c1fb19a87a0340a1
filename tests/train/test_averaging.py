"""The average of the weights is that of one device, under any plan, and after a stop."""

import pytest
import torch

from shardwright.checkpoint import load_weights, save_weights
from shardwright.train.ema_callback import EMACallback

from .runs import Net, by_hand, close, losses, net, parameters, rows, trainer


def wanted(steps):
    """The average by hand after so many steps."""
    kept = {key: value.clone() for key, value in net().state_dict().items()}
    by_name = {}

    def note(step, model):
        for key, value in model.state_dict().items():
            if step:
                kept[key].lerp_(value, 0.1)
        if step == steps:
            by_name.update({key: value.clone() for key, value in kept.items()})

    by_hand(steps // 3 + 1, note)
    return by_name


def run(rank, folder, more):
    averaging = EMACallback(decay=0.9)
    training = trainer(folder, callbacks=[averaging], val_data=rows(5), **more)
    training.fit()
    after = parameters(training)
    with averaging.applied():
        actual = parameters(training)
    close(parameters(training), after)
    return actual, losses(training, "val_loss"), after


@pytest.mark.parametrize("plan", ["tp=2", "zero3=2", "pp=2"])
def test_the_average_on_two_ranks_is_that_of_one_device_and_goes_on_there(plan, tmp_path, pools):
    pools[2].run(run, tmp_path, {"plan": plan, "max_steps": 2})
    actual, validated, _ = run(0, tmp_path, {"max_steps": 4, "resume": "last"})
    close(actual, wanted(4))
    model = net()
    model.load_state_dict(actual)
    data = rows(5)
    loss = model(torch.stack([x for x, _ in data]), torch.stack([y for _, y in data]))
    assert validated[4] == pytest.approx(loss.item(), abs=1e-12)


def test_the_average_leaves_as_ordinary_weights(tmp_path):
    averaging = EMACallback(decay=0.9)
    training = trainer(tmp_path, callbacks=[averaging], max_steps=3)
    training.fit()
    with averaging.applied():
        save_weights(tmp_path / "average.safetensors", training.model)
    alone = Net().double()
    load_weights(tmp_path / "average.safetensors", alone)
    close(dict(alone.state_dict()), wanted(3))


def test_a_run_that_had_no_average_begins_with_its_weights(tmp_path):
    training = trainer(tmp_path, max_steps=2)
    training.fit()
    averaging = EMACallback()
    trainer(tmp_path, max_steps=2, callbacks=[averaging], resume="last").fit()
    close(dict(averaging.state_dict()["averages"]), parameters(training))
