"""A run on packed documents: from Python and YAML, in parts, resumed, and what is refused."""

import textwrap

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from shardwright.cli import main
from shardwright.data import PackedDocuments, Packing, loader
from shardwright.errors import InputError
from shardwright.train import LoaderOptions
from tests.models.packed_gpt import PackedGPT

from .runs import close, losses, parameters, trainer

LENGTH = PackedGPT.length
PACKING = Packing(length=LENGTH, shift_labels=True, window=4)


class Documents(Dataset):
    """Documents of unequal lengths."""

    def __init__(self, count: int = 40) -> None:
        generator = torch.Generator().manual_seed(1)
        lengths = torch.randint(1, 2 * LENGTH, (count,), generator=generator).tolist()
        self.documents = [torch.randint(PackedGPT.vocabulary, (n,), generator=generator) for n in lengths]

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.documents[index]


class DocumentStream(IterableDataset):
    def __iter__(self):
        return iter(Documents().documents)


def model():
    torch.manual_seed(2)
    return PackedGPT().double()


def packed_run(folder, **options):
    usual = {"model": model(), "train_data": Documents(), "batch_size": 4, "reduction": "token", "max_steps": 16,
             "loader": LoaderOptions(packing=PACKING)}  # fmt: skip
    return trainer(folder, **{**usual, **options})


def by_hand(steps):
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    batches = loader(PackedDocuments(Documents(), PACKING, shuffle=True, seed=4), 4)
    seen = {}
    while len(seen) < steps:
        for batch in batches:
            loss = net(**batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen[len(seen) + 1] = loss.item()
            if len(seen) == steps:
                break
    return seen, net.state_dict()


def test_a_run_is_that_of_a_plain_loop_also_in_parts(tmp_path):
    wanted, values = by_hand(16)
    for name, options in (("whole", {}), ("parts", {"micro_batch_size": 1}), ("ahead", {"workers": 2})):
        ahead = LoaderOptions(packing=PACKING, workers=options.pop("workers", 0))
        run = packed_run(tmp_path / name, loader=ahead, **options)
        progress = run.fit()
        assert progress.epoch == 1  # so that two orders are seen
        close(losses(run), wanted)
        close(parameters(run), values)


def test_a_run_resumes_in_the_middle_of_an_epoch(tmp_path):
    whole = packed_run(tmp_path / "whole")
    whole.fit()
    first = packed_run(tmp_path / "two", max_steps=3)
    first.fit()
    second = packed_run(tmp_path / "two", resume="last", inputs="per_replica")
    second.fit()
    assert {**losses(first), **losses(second)} == losses(whole)


def test_a_stream_is_packed_too(tmp_path):
    inputs = packed_run(tmp_path / "list", loader=LoaderOptions(packing=PACKING, shuffle=False))
    inputs.fit()
    streamed = packed_run(tmp_path / "stream", train_data=DocumentStream())
    streamed.fit()
    assert losses(streamed) == losses(inputs)


CONFIG = """\
model: tests.models.packed_gpt.PackedGPT
train_data: tests.train.test_packing.Documents
val_data: {class_path: tests.train.test_packing.Documents, init_args: {count: 5}}
batch_size: 4
max_steps: 2
plan: single
optimization: {reduction: token}
loader:
  packing: {length: 12, shift_labels: true, long: cut}
logging: {loggers: [shardwright.train.CSVLogger]}
"""


def test_packing_in_a_config_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(textwrap.dedent(CONFIG))
    assert main(["train", "config.yaml", "--directory", "run"]) == 0
    assert "packing:" in (tmp_path / "run" / "config.yaml").read_text()
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) > 2
    (tmp_path / "wrong.yaml").write_text(CONFIG.replace("long: cut", "longer: cut"))
    assert main(["train", "wrong.yaml", "--directory", "other"]) != 0
    assert "wrong.yaml:9: there is no setting loader.packing.longer" in capsys.readouterr().err


def test_settings_that_would_not_give_the_mean_over_tokens_are_refused(tmp_path):
    with pytest.raises(InputError, match=r'set optimization\.reduction="token"'):
        packed_run(tmp_path, reduction="mean")
    with pytest.raises(InputError, match="the data yields batches already: pass the documents"):
        packed_run(tmp_path, train_data=loader(Documents(), 4), batch_size=None)
    with pytest.raises(InputError, match=r"loader\.draw_by_row is for rows that are samples"):
        LoaderOptions(packing=PACKING, draw_by_row=True)
