"""Parameters have the settings that patterns give them, on many ranks too."""

import pytest
import torch

from shardwright.errors import InputError
from shardwright.train.groups import grouped

from .runs import close, losses, net, parameters, trainer

GROUPS = [{"match": "*.bias", "weight_decay": 0.0, "lr": 0.002}, {"match": ["down.*"], "weight_decay": 0.5}]


def test_the_first_pattern_that_fits_decides():
    model = net()
    rest, biases, down = grouped(model, GROUPS)
    assert rest == {"params": [model.up.weight]}
    assert biases["params"] == [model.up.bias, model.down.bias] and biases["lr"] == 0.002
    assert down == {"params": [model.down.weight], "weight_decay": 0.5}


def test_a_pattern_that_fits_nothing_is_refused():
    with pytest.raises(InputError, match=r"'dwn.weight' matches no parameter; did you mean 'down.weight'"):
        grouped(net(), [{"match": "dwn.weight"}])
    with pytest.raises(InputError, match=r"parameter_groups\[0\] needs a pattern"):
        grouped(net(), [{"weight_decay": 0.0}])


def run(rank, folder, more):
    training = trainer(folder, parameter_groups=GROUPS, **more)
    training.fit()
    return losses(training), parameters(training)


def test_groups_keep_their_settings_on_two_ranks(tmp_path, pools):
    wanted, values = run(0, tmp_path / "alone", {"max_steps": 3})
    actual, stored = pools[2].run(run, tmp_path / "two", {"plan": "pp=2", "max_steps": 3})[0]
    close(actual, wanted)
    close(stored, values)
    plain = trainer(tmp_path / "plain", max_steps=3)
    plain.fit()
    assert not torch.equal(parameters(plain)["down.weight"], values["down.weight"])
