"""What a compiled step can't do is refused, with what to do instead; on one process, which refuses as many do."""

import pytest
from torch import nn

from shardwright.errors import CaptureError, InputError
from shardwright.lightning import ShardwrightStrategy

from .modules import Epochs, Net, Numbers, Remembers, ours, quiet, rows, trainer


@pytest.mark.parametrize(
    ("make", "named"), [(Epochs, "self.current_epoch"), (Numbers, "batch_idx"), (Remembers, "self.seen")]
)
def test_what_differs_from_call_to_call_is_named(make, named):
    with quiet(), pytest.raises(CaptureError, match=rf"training_step .*{named}.*parts="):
        ours("single", 1).fit(make().double(), rows())


def test_precision_is_said_once():
    with quiet(), pytest.raises(InputError, match="precision is said twice"):
        trainer(ShardwrightStrategy("single", precision="bf16"), 1, precision="bf16-mixed").fit(Net(), rows())


def test_a_module_with_pieces_for_one_plan_is_not_fitted_under_another(tmp_path):
    with quiet():
        net = Net().double()
        ours("single", 1, max_epochs=1).fit(net, rows())
        with pytest.raises(InputError, match=r"compiled with plan='single' .* make a new one"):
            ours("dp=1", 1).fit(net, rows())


class Strange(Net):
    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_a_hyperparameter_that_can_not_be_saved_is_refused_at_the_start():
    with quiet(), pytest.raises(InputError, match=r"hyperparameter loss .*ignore=\['loss'\]"):
        ours("single", 1).fit(Strange(nn.MSELoss()).double(), rows())
