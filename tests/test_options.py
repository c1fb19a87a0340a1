"""Options in groups: what reads them, and what is said of a keyword that has moved into one."""

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.cli import main
from shardwright.errors import InputError
from shardwright.lightning import ShardwrightStrategy
from shardwright.options import KINDS, MOVED, expect_only, read_options
from shardwright.train.options import MOVED_IN_TRAINER

X = torch.randn(4, 8)
FUNCTIONS = {
    "sw.parallelize": lambda **old: sw.parallelize(nn.Linear(8, 8), **old),
    "sw.plan": lambda **old: sw.plan(nn.Linear(8, 8), example=X, **old),
    "sw.verify": lambda **old: sw.verify(nn.Linear(8, 8), example=X, **old),
    "sw.rehearse": lambda **old: sw.rehearse("dp=2", nn.Linear(8, 8), example=X, **old),
    "ShardwrightStrategy": lambda **old: ShardwrightStrategy("auto", **old),
}
CONFIG = """\
model: {class_path: torch.nn.Linear, init_args: {in_features: 8, out_features: 8}}
train_data: {class_path: tests.train.parts.Pairs, init_args: {size: 16}}
max_steps: 1
"""


@pytest.mark.parametrize("name", MOVED)
@pytest.mark.parametrize("where", FUNCTIONS)
def test_a_keyword_that_has_moved_is_refused_with_its_new_place(where, name):
    if where == "ShardwrightStrategy" and name in ("parts", "timeout"):
        return  # which it takes itself
    group, field = MOVED[name].split(".")
    with pytest.raises(InputError) as error:
        FUNCTIONS[where](**{name: 1})
    assert str(error.value) == f"{where}: {name}= is now {group}={KINDS[group]}({field}=...)"


@pytest.mark.parametrize("name", MOVED_IN_TRAINER)
def test_an_argument_of_a_trainer_that_has_moved_is_refused_with_its_new_place(name):
    group, field = MOVED_IN_TRAINER[name].split(".")
    with pytest.raises(InputError) as error:
        sw.Trainer(model=nn.Linear(8, 8), train_data=[], max_steps=1, **{name: 1})
    assert str(error.value) == f"sw.Trainer: {name}= is now {group}={KINDS[group]}({field}=...)"


@pytest.mark.parametrize("place", {**MOVED, **MOVED_IN_TRAINER}.values())
def test_every_new_place_exists(place):
    group, field = place.split(".")
    kind = sw
    for part in KINDS[group].split(".")[1:]:
        kind = getattr(kind, part)
    assert hasattr(kind(), field)


def test_all_keywords_that_have_moved_are_named_at_once():
    with pytest.raises(InputError, match=r"microbatches= is now .*; directory= is now "):
        sw.parallelize(nn.Linear(8, 8), microbatches=2, directory="x")


@pytest.mark.parametrize("name", MOVED_IN_TRAINER)
def test_a_key_of_a_file_that_has_moved_is_named_with_its_line(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(f"{CONFIG}{name}: 1\n")
    assert main(["train", "config.yaml"]) == 2
    assert f"config.yaml:4: {name} is now {MOVED_IN_TRAINER[name]}" in capsys.readouterr().err


@pytest.mark.parametrize("name", MOVED_IN_TRAINER)
def test_a_word_on_the_command_line_that_has_moved_is_named(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(CONFIG)
    assert main(["train", "config.yaml", f"--{name}", "1"]) == 2
    assert f"--{name} is now --{MOVED_IN_TRAINER[name]}" in capsys.readouterr().err


def test_what_is_below_a_word_moves_with_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(CONFIG)
    assert main(["train", "config.yaml", "--profile.start=3", "--loggers+=shardwright.train.CSVLogger"]) == 2
    message = capsys.readouterr().err
    assert "--profile.start is now --logging.profile.start" in message
    assert "is now --logging.loggers" in message


def test_a_group_is_an_object_or_a_dict_of_its_fields():
    options = sw.PipelineOptions(microbatches=4)
    assert read_options(sw.PipelineOptions, {"microbatches": 4}) == options
    assert read_options(sw.PipelineOptions, options) is options
    assert read_options(sw.PipelineOptions, None) == sw.PipelineOptions()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: sw.PipelineOptions(microbatches=0), "pipeline.microbatches=0 makes no sense"),
        (
            lambda: sw.PipelineOptions(semantics="mine"),
            "pipeline.semantics='mine' is not known; use 'global' or 'local'",
        ),
        (lambda: sw.PipelineOptions(semantics="local"), "needs to know how many microbatches there are"),
        (lambda: sw.PipelineOptions(backward="beside"), "pipeline.backward='beside' is not known"),
        (lambda: sw.CompileOptions(outputs="loss"), "compile.outputs='loss' is not known; use 'all' or 'scalars'"),
        (lambda: sw.CompileOptions(opaque="no"), "compile.opaque='no' is not known"),
        (
            lambda: sw.parallelize(nn.Linear(8, 8), pipeline={"microbatch": 2}),
            "PipelineOptions has no microbatch; it has",
        ),
        (lambda: sw.parallelize(nn.Linear(8, 8), pipeline=4), "4 is no PipelineOptions"),
    ],
)
def test_options_that_make_no_sense_are_refused(make, words):
    with pytest.raises(InputError) as error:
        make()
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FUNCTIONS["sw.plan"](compile={"directory": "x"}), "CompileOptions(directory=...) is not for sw.plan"),
        (
            lambda: FUNCTIONS["sw.plan"](pipeline={"backward": "outside"}),
            "PipelineOptions(backward=...) is not for sw.plan",
        ),
        (
            lambda: FUNCTIONS["sw.verify"](compile={"unbatched": ["mask"]}),
            "CompileOptions(unbatched=...) is not for sw.verify",
        ),
        (
            lambda: FUNCTIONS["sw.rehearse"](compile={"parts": ["x"]}),
            "CompileOptions(parts=...) is not for sw.rehearse",
        ),
        (
            lambda: ShardwrightStrategy(compile={"parts": ["x"]}),
            "CompileOptions(parts=...) is not for ShardwrightStrategy: it has an argument of this name",
        ),
        (
            lambda: sw.Trainer(model=nn.Linear(8, 8), train_data=[], max_steps=1, compile={"directory": "x"}),
            "CompileOptions(directory=...) is not for a Trainer",
        ),
        (
            lambda: sw.parallelize(
                nn.Sequential(nn.Linear(8, 8)), compile={"parts": ["0"]}, pipeline={"microbatches": 2}
            ),
            "PipelineOptions(microbatches=...) is not for parts",
        ),
    ],
)
def test_options_without_effect_at_a_place_are_refused_there(make, words):
    with pytest.raises(InputError) as error:
        make()
    assert words in str(error.value)


def test_the_usual_options_have_an_effect_everywhere():
    expect_only(sw.CompileOptions(), (), "anywhere", "nothing is asked for")


def test_a_misspelt_keyword_is_answered_with_the_right_one():
    with pytest.raises(TypeError, match=r"sw.parallelize takes no examples=; did you mean 'example'\?"):
        sw.parallelize(torch.nn.Linear(2, 2), examples=1)
    with pytest.raises(TypeError, match=r"sw.Trainer takes no max_step=; did you mean 'max_steps'\?"):
        sw.Trainer(model=torch.nn.Linear(2, 2), train_data=[1], max_step=1)


@pytest.mark.parametrize(
    ("passed", "message"),
    [
        ({"inputs": "rows"}, "inputs='rows' is not a mode"),
        ({"cluster": "auto"}, "sw.plan runs nothing; pass a name"),
        ({"accumulate": 0}, "accumulate=0 makes no sense"),
    ],
)
def test_sw_plan_refuses_what_it_would_not_heed(passed, message):
    with pytest.raises(InputError, match=message):
        sw.plan(torch.nn.Linear(2, 2), example=torch.zeros(2, 2), **passed)
