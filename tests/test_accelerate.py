"""accelerate beside a compiled model: what it would wrap is refused, the rest of it works (docs/huggingface.md)."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.utils.data import DataLoader

import shardwright as sw
from shardwright.errors import InputError
from tests.parity.conftest import pools

__all__ = ["pools"]

DATA = torch.randn(24, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)
        self.double()

    def forward(self, x):
        return self.down(self.up(x).relu()).square().mean()


def new():
    model = Net()
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def accelerator():
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=True)


def prepare_each(rank, folder):
    model, optimizer = sw.parallelize(*new(), plan="tp=2", example=(DATA[:4],), compile={"directory": folder})
    _, not_compiled_yet = sw.parallelize(*new(), plan="tp=2")
    before, texts = model.full_state_dict(), []
    for prepare, of in (("prepare", model), ("prepare", optimizer), ("prepare", not_compiled_yet),
                        ("prepare_model", model), ("save_model", model)):  # fmt: skip
        try:
            getattr(accelerator(), prepare)(of, *([f"{folder}/saved"] if prepare == "save_model" else []))
            texts.append(f"{prepare} of {type(of).__name__} was not refused")
        except InputError as error:
            texts.append(str(error))
    return texts, all(torch.equal(before[key], value) for key, value in model.full_state_dict().items())


def test_preparing_or_saving_by_accelerate_is_refused(pools, tmp_path):
    for texts, untouched in pools[2].run(prepare_each, str(tmp_path)):
        *prepared, saved = texts
        assert all("out of accelerator.prepare (docs/huggingface.md)" in text for text in prepared), prepared
        assert "sw.save(path, model, optimizer)" in saved
        assert untouched


def test_so_it_is_on_one_process(tmp_path):
    model, optimizer = sw.parallelize(*new(), plan="single", example=(DATA[:4],), compile={"directory": tmp_path})
    with pytest.raises(InputError, match="Leave the model, the optimizer and the scheduler out"):
        accelerator().prepare(model, optimizer)


def train(model, optimizer, batches, clip, backward):
    losses = []
    for x in batches:
        loss = model(x)
        backward(loss)
        clip(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_beside(rank, folder):
    """The loader is prepared: each rank passes its own samples."""
    accelerate = accelerator()
    batches = accelerate.prepare(DataLoader(DATA, batch_size=2))
    model, optimizer = sw.parallelize(
        *new(), plan="zero3=2", inputs="per_rank", example=(DATA[:2],), compile={"directory": folder}
    )
    losses = train(model, optimizer, batches, accelerate.clip_grad_norm_, accelerate.backward)
    gathered = accelerate.gather(torch.tensor([losses[-1]]))
    return losses, model.full_state_dict(), gathered.tolist(), accelerate.is_main_process


def test_the_rest_of_accelerate_works_beside_a_compiled_model(pools, tmp_path):
    model, optimizer = new()
    expected = train(model, optimizer, DATA.split(4), torch.nn.utils.clip_grad_norm_, lambda loss: loss.backward())
    results = pools[2].run(train_beside, str(tmp_path))
    for losses, weights, gathered, _ in results:
        assert losses == pytest.approx(expected, rel=1e-10)
        assert gathered == pytest.approx([expected[-1]] * 2, rel=1e-6)
        for key, value in model.state_dict().items():
            assert (weights[key] - value).abs().max() <= 1e-10 * value.abs().max()
    assert [main for *_, main in results] == [True, False]
