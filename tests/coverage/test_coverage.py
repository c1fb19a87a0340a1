"""A fast subset of the coverage benchmark: architectures of all kinds that parity tests don't have, under dp and tp."""

from dataclasses import replace

import pytest
from bench.architectures.configs import small_config
from bench.architectures.listed import architectures
from bench.architectures.measure import Row, rows
from bench.architectures.page import page, shares
from bench.coverage import read, write

SUBSET = ("mobilebert", "bart", "llava", "clip", "gpt_neox", "mixtral", "qwen2", "resnet", "wav2vec2")


@pytest.fixture(scope="module")
def known():
    return {architecture.model_type: architecture for architecture in architectures()}


@pytest.mark.parametrize("model_type", SUBSET)
def test_an_architecture_is_captured_and_verified_under_dp_and_tp(known, model_type):
    actual = list(rows(known[model_type]))
    assert [row for row in actual if not (row.built and row.captured and row.dp and row.tp)] == []
    assert [row.labels for row in actual] == [False, True]


def test_there_are_at_least_150_architectures_of_each_kind_that_the_table_names(known):
    kinds = [value.kind for value in known.values()]
    assert len(kinds) > 150
    assert set(kinds) >= {"causal", "masked", "seq2seq", "vision", "audio", "multimodal"}


def test_a_small_config_is_small_and_its_parts_are_too(known):
    config = small_config(known["clip"].model_class().config_class)
    assert (config.text_config.hidden_size, config.text_config.num_hidden_layers) == (32, 2)
    assert (config.vision_config.image_size, config.vision_config.num_attention_heads) == (32, 4)


ROW = Row(model_type="bert", kind="masked", model="BertForMaskedLM", labels=False, built=True, captured=True, dp=True,
          tp=True, split=0.95, capture_seconds=1.5, parameters=10, attention=2, unmasked=2)  # fmt: skip
BAD = Row(model_type="gpt2", kind="causal", model="GPT2LMHeadModel", labels=True, built=True, captured=True, dp=True,
          split=0.5, tp_reason="tp=2: it differs", attention=3, causal=1,
          masks="causal, documents by ids; unknown")  # fmt: skip


def test_rows_are_read_as_they_were_written(tmp_path):
    write(tmp_path / "coverage.csv", [ROW, BAD])
    assert read(tmp_path / "coverage.csv") == [ROW, BAD]


def test_the_page_gives_shares_and_reasons():
    parts = replace(ROW, model="OddModel", parts="encoder.gate", reason="it branches")
    assert shares([ROW, parts, BAD, BAD]) == {"whole": 0.75, "captured": 1.0, "dp": 1.0, "tp": 0.5, "split": 0.5}
    text = page([ROW, parts, BAD])
    assert "| OddModel |  | in parts | yes | yes | 95% | 2/2 f | 1.5 |" in text
    assert "- OddModel (`encoder.gate`): it branches" in text
    assert "| BertForMaskedLM |  | yes | yes | yes | 95% | 2/2 f | 1.5 |" in text
    assert "| GPT2LMHeadModel | yes | yes | yes | **no** | 50% | 1/3 c: causal, documents; unknown | 0.0 |" in text
    assert "- GPT2LMHeadModel with labels: tp=2: it differs" in text
