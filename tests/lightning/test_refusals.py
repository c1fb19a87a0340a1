"""What a compiled step can't do is refused, with what to do instead; on one process, which refuses as many do."""

import pytest
from torch import nn

from shardwright.errors import CaptureError, InputError

from .modules import Epochs, Net, Numbers, Remembers, ours, quiet, rows


@pytest.mark.parametrize(
    ("make", "named"), [(Epochs, "self.current_epoch"), (Numbers, "batch_idx"), (Remembers, "self.seen")]
)
def test_what_differs_from_call_to_call_is_named(make, named):
    with quiet(), pytest.raises(CaptureError, match=rf"training_step .*{named}.*parts="):
        ours("single", 1).fit(make().double(), rows())


class Strange(Net):
    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_a_hyperparameter_that_can_not_be_saved_is_refused_at_the_start():
    with quiet(), pytest.raises(InputError, match=r"hyperparameter loss .*ignore=\['loss'\]"):
        ours("single", 1).fit(Strange(nn.MSELoss()).double(), rows())
