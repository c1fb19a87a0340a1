"""The race of models: one tiny race on two processes, and the tables that are made of results."""

from __future__ import annotations

import json

from bench.model_race import Standing, contenders_of, left_out, markdown, results_of, run_model
from bench.models import MODELS, ModelWorkload
from bench.ranks import Finish

from bench import model_race

TINY = ModelWorkload(
    name="tiny", kind="gpt", seq=8, batch=4, vocab=16, sizes={"vocab": 16, "seq": 8, "n_layer": 2, "n_head": 2, "d": 8}
)
RUN = {
    "machine": "a machine",
    "python": "3",
    "torch": "2",
    "transformers": "5",
    "date": "2026-11-18T00:00:00",
    "load": 0,
}


def test_a_race_measures_time_and_memory_of_every_contender():
    standing = run_model(TINY, 2, 2, 1, ("ddp", "dp=2"))

    assert list(standing.finishes) == ["ddp", "dp=2"]
    for finish in standing.finishes.values():
        assert len(finish.wall) == len(finish.cpu) == 2
        assert min(finish.wall) > 0
        assert finish.memory is not None
        assert finish.memory > 4 * 3 * 2000  # parameters and AdamW's state, of more than 2,000 elements
    assert "dp=2" in standing.finishes["dp=2"].plan
    assert standing.fastest_peer == "ddp"


def finish(wall: float) -> Finish:
    return Finish(wall=[wall, wall], cpu=[wall, wall], memory=2**20, plan="", predicted=None)


def test_the_page_has_the_ratio_to_the_fastest_peer_and_the_reasons(tmp_path, monkeypatch):
    finishes = {
        "eager": finish(0.4),
        "ddp": finish(0.3),
        "fsdp2": finish(0.5),
        "auto": finish(0.2),
        "zero3=2": finish(0.4),
    }
    standing = Standing(model="resnet", ranks=2, finishes=finishes, left_out=left_out(MODELS["resnet"]))
    results = json.loads(json.dumps(results_of([standing], RUN, 2)))
    page = tmp_path / "benchmarks.md"
    page.write_text("\n".join(["before", *model_race.MARKS, "after"]))
    monkeypatch.setattr(model_race, "PAGE", page)

    model_race.write_page(results)

    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter")
    row = next(line for line in text.splitlines() if line.startswith("| resnet"))
    assert "1.50 ± 0.00 | 1.25 ± 0.00" in row
    assert "DTensor TP of resnet: no ParallelStyle for convolutions" in text
    assert markdown(results) in text


def test_every_peer_races_or_has_a_reason():
    for work in MODELS.values():
        names, reasons = contenders_of(work, 2), left_out(work)
        assert all((peer in names) != (peer in reasons) for peer in model_race.PEERS)
        assert {"auto", "dp=2", "zero3=2"} <= set(names)
