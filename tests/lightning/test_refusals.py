"""What a compiled step can't do is refused, with what to do instead; on one process, which refuses as many do."""

import pytest
from torch import nn
from torch.utils.data import DataLoader

from shardwright.errors import CaptureError, InputError
from shardwright.lightning import ShardwrightStrategy

from .modules import Counts, Epochs, Judged, Net, Numbers, Remembers, ours, quiet, rows, trainer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Epochs, "training_step uses self.current_epoch"),
        (Numbers, "training_step uses batch_idx"),
        (Remembers, "training_step sets self._seen"),
        (Counts, "training_step sets self.counts"),
        (Judged, "a step uses the result of a metric"),
    ],
)
def test_what_a_program_would_have_fixed_is_named(make, message):
    with quiet(), pytest.raises(CaptureError, match=rf"{message}.*parts="):
        ours("single", 1).fit(make().double(), rows())


def test_text_in_a_batch_is_left_alone_until_a_step_looks_at_it():
    data = DataLoader([{"x": row, "y": y, "name": str(y)} for row, y in rows().dataset], batch_size=8)
    with quiet():
        ours("single", 1).fit(Dicts().double(), data)
        with pytest.raises(CaptureError, match="neither a tensor nor a number"):
            ours("single", 1).fit(Dicts(looks=True).double(), data)


class Dicts(Net):
    def __init__(self, looks: bool = False) -> None:
        super().__init__()
        self.looks = looks

    def training_step(self, batch, batch_idx):
        loss = super().training_step((batch["x"], batch["y"]), batch_idx)
        return loss * 2 if self.looks and batch["name"][0] == "1" else loss


def test_precision_is_said_once():
    with quiet(), pytest.raises(InputError, match="precision is set twice"):
        trainer(ShardwrightStrategy("single", precision="bf16"), 1, precision="bf16-mixed").fit(Net(), rows())


def test_a_module_with_shards_for_one_plan_is_not_fitted_under_another(tmp_path):
    with quiet():
        net = Net().double()
        ours("single", 1, max_epochs=1).fit(net, rows())
        with pytest.raises(InputError, match=r"compiled with plan='single' .* create a new one"):
            ours("dp=1", 1).fit(net, rows())


class Strange(Net):
    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_a_hyperparameter_that_can_not_be_saved_is_refused_at_the_start():
    with quiet(), pytest.raises(InputError, match=r"hyperparameter loss .*ignore=\['loss'\]"):
        ours("single", 1).fit(Strange(nn.MSELoss()).double(), rows())
