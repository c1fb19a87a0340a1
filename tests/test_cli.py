"""The commands, as a user types them."""

import inspect
import json
import signal
import subprocess
import sys
import typing

import pytest
import torch

from shardwright.cli import main
from shardwright.cli.arguments import COMMANDS
from shardwright.cli.models import resize_batch
from shardwright.cli.progress import SearchProgress
from shardwright.cli.train_help import GROUPS, settings
from shardwright.runtime.collectives import comm
from shardwright.train import Trainer

NET = """
import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x, y):
        return F.mse_loss(self.down(F.gelu(self.up(x))), y)


def make_model():
    torch.manual_seed(0)
    return Net(), (torch.randn(4, 8), torch.randn(4, 8))


def make_alone():
    return Net()


def make_nothing():
    return 3
"""


@pytest.fixture
def net(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    yield "net.py:make_model"
    sys.modules.pop("net", None)


def test_plan_writes_a_file_that_explain_and_verify_read(net, tmp_path, capsys):
    assert main(["plan", net, "--plan", "tp=2", "--full", "-o", "plans/plan.json"]) == 0
    assert json.loads((tmp_path / "plans/plan.json").read_text())["mesh"] == {"tp": 2}
    assert "up.weight" in capsys.readouterr().out

    assert main(["explain", "plans/plan.json"]) == 0
    out = capsys.readouterr().out
    assert "Net under tp=2" in out
    assert "predicted step time" in out
    assert "how ops are split" not in out
    assert main(["explain", "plans/plan.json", "--full"]) == 0
    assert "how ops are split" in capsys.readouterr().out
    assert main(["explain", "plans/plan.json", "--model", net]) == 0
    assert "collectives of a training step" in capsys.readouterr().out

    assert main(["verify", net, "--plan", "plans/plan.json", "--steps", "1"]) == 0


POLICY = """
from shardwright.policy import PolicyBuilder


def halves(graph, cluster):
    plan = PolicyBuilder(graph, cluster, tp=cluster.size)
    plan.split("up", "n", over="tp")
    return plan.build()
"""


def test_a_policy_is_named_by_its_file(net, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(POLICY)
    assert main(["plan", net, "--plan", "mine.py:halves", "--ranks", "2", "-o", "plan.json"]) == 0
    assert "Net under policy halves" in capsys.readouterr().out
    assert main(["verify", net, "--plan", "mine.py:halves", "--ranks", "2"]) == 0
    assert main(["compile", net, "--plan", "mine.py:halves", "--ranks", "2"]) == 0
    assert main(["plan", net, "--plan", "auto,tp=2", "--ranks", "2"]) == 0
    assert "mesh tp=2" in capsys.readouterr().out


def test_a_plan_is_searched_for_a_cluster_by_name(net, tmp_path, capsys):
    options = ["--cluster", "4xA100-80GB", "--batch", "64", "--precision", "bf16-mixed", "--optimizer", "momentum"]
    assert main(["plan", net, *options, "--memory", "1GiB", "--accumulate", "2", "-o", "plan.json"]) == 0

    out = capsys.readouterr().out
    assert "4 devices of 4xA100-80GB; batch 64, momentum, in bf16-mixed, gradient accumulation 2" in out
    assert "of the limit of 1.0 GiB" in out
    message = json.loads((tmp_path / "plan.json").read_text())
    assert message["policy"] == "auto"
    assert message["predicted"]["train"]["gap"] < 0.01


def test_the_cluster_may_be_a_file_or_larger_than_what_is_asked_for(net, tmp_path, capsys):
    (tmp_path / "lab.yaml").write_text(LAB)
    assert main(["plan", net, "--cluster", "lab.yaml", "--ranks", "2"]) == 0
    assert "2 devices of lab" in capsys.readouterr().out
    assert main(["plan", net, "--cluster", "lab.yaml", "--plan", "tp=2"]) == 0
    assert "Net under tp=2" in capsys.readouterr().out


def test_rows_of_a_batch_are_split_only_where_inputs_are_rows(net, capsys):
    assert main(["plan", net, "--cluster", "cpu:2", "--inputs", "per_replica", "--full"]) == 0
    assert "mesh dp=2" in capsys.readouterr().out


def test_a_plan_is_drawn_alone_with_its_model_and_beside_another(net, tmp_path, capsys):
    for name, plan in (("plan", "tp=2"), ("other", "dp=2")):
        assert main(["plan", net, "--plan", plan, "-o", f"{name}.json"]) == 0
    capsys.readouterr()
    assert main(["report", "plan.json", "-o", "drawn/report.html"]) == 0
    assert "--model" in capsys.readouterr().out
    assert main(["report", "plan.json", "other.json", "--model", net, "--trace", "step.json"]) == 0
    assert capsys.readouterr().out == "predicted trace written to step.json\nwritten to report.html\n"
    assert json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert main(["report", "plan.json", "--trace", "step.json"]) == 2
    assert "without a pipeline needs its model" in capsys.readouterr().err
    alone, both = (tmp_path / "drawn/report.html").read_text(), (tmp_path / "report.html").read_text()
    assert '"curves":' in both and '"curves":' not in alone
    assert '"difference":' in both and '"difference":' not in alone


def test_an_op_is_explained_on_the_terms_of_the_plan(net, capsys):
    assert main(["plan", net, "--plan", "tp=2", "--cluster", "2xH100", "-o", "plan.json"]) == 0
    capsys.readouterr()

    assert main(["explain", "plan.json", "--model", net, "--op", "up / linear"]) == 0
    chosen = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("*"))
    assert "tp: n (weights)" in chosen

    assert main(["explain", "plan.json", "--op", "up / linear"]) == 2
    assert "--model" in capsys.readouterr().err
    assert main(["explain", "plan.json", "--model", net, "--op", "up"]) == 2
    assert "there are up / linear" in capsys.readouterr().err


def test_two_plan_files_are_compared(net, capsys):
    for plan in ("tp", "dp"):
        assert main(["plan", net, "--plan", f"{plan}=2", "-o", f"{plan}.json"]) == 0
    assert main(["plan", net, "--plan", "zero2=2", "-o", "zero.json"]) == 0
    capsys.readouterr()

    assert main(["diff", "tp.json", "dp.json"]) == 0
    out = capsys.readouterr().out
    assert "blocking communication" in out
    assert "up / linear" in out
    assert main(["diff", "dp.json", "zero.json", "--model", net]) == 0
    out = capsys.readouterr().out
    assert "with only this part taken from the second" in out
    assert main(["diff", "tp.json", "tp.json"]) == 0
    assert "the plans make the same decisions" in capsys.readouterr().out


def test_ctrl_c_ends_a_search_with_the_best_so_far(net, tmp_path, capsys, monkeypatch):
    shown = []

    def interrupted(watching, what, best):
        SearchProgress.__call__(watching, what, best)
        shown.append((what, best))
        if len(shown) == 1:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(
        "shardwright.cli.plans.SearchProgress", type("Interrupted", (SearchProgress,), {"__call__": interrupted})
    )
    before = signal.getsignal(signal.SIGINT)
    assert main(["plan", net, "--cluster", "8xA100-80GB", "--batch", "64", "-o", "plan.json"]) == 0

    assert "the search was stopped early" in capsys.readouterr().out
    assert json.loads((tmp_path / "plan.json").read_text())["predicted"]["train"]["stopped"]
    assert [what for what, _ in shown] == ["bounded 8", "solved 8"]  # and no other mesh
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_before_the_search_or_twice_gives_up(net, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("shardwright.cli.plans.planned", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    assert main(["plan", net, "--cluster", "8xA100-80GB", "-o", "plan.json"]) == 130
    assert "interrupted" in capsys.readouterr().err

    def twice(module, example, request, *_, **__):
        request.options.report("bounded 8", 1.0)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("shardwright.cli.plans.planned", twice)
    assert main(["plan", net, "--cluster", "8xA100-80GB", "-o", "plan.json"]) == 130
    err = capsys.readouterr().err
    assert "stopping with the best plan so far; press Ctrl-C again to abort" in err
    assert "interrupted, and nothing was written" in err
    assert not (tmp_path / "plan.json").exists()


def test_a_search_without_time_says_so(net, capsys):
    assert main(["plan", net, "--cluster", "8xA100-80GB", "--batch", "64", "--seconds", "0"]) == 0
    assert "the search was stopped early" in capsys.readouterr().out


LAB = """
version: 1
name: lab
groups: [{device: A100-80GB, devices: 4}]
"""


def test_compile_writes_code_that_can_be_read(net, tmp_path, capsys):
    assert main(["compile", net, "--plan", "dp=2,tp=2", "-o", "out", "--batch", "8"]) == 0

    (path,) = (tmp_path / "out").rglob("*.py")
    text = path.read_text()
    compile(text, str(path), "exec")
    assert "class Net(Program)" in text
    assert "B = 8" in text
    assert "4 devices" in capsys.readouterr().out
    assert not list((tmp_path / "out").rglob("*.part"))


def test_compile_for_evaluation(net, tmp_path):
    assert main(["compile", net, "--plan", "tp=2", "-o", "out", "--entry", "eval"]) == 0
    assert len(list((tmp_path / "out").rglob("eval_*.py"))) == 1


def test_verify_prints_a_table_and_says_yes(net, capsys):
    assert main(["verify", net, "--plan", "tp=2", "--eval"]) == 0

    out = capsys.readouterr().out
    assert "eval output" in out
    assert "the same; worst: " in out


def test_verify_says_no_and_where(net, capsys, monkeypatch):
    monkeypatch.setattr(comm, "all_reduce_", lambda x, group: x)

    assert main(["verify", net, "--plan", "tp=2", "--steps", "1", "--trace"]) == 1

    out = " ".join(capsys.readouterr().out.split())
    assert "tensors differ" in out
    assert "the first difference: down / bias < all_reduce down" in out


def test_verify_without_a_plan_tries_one_of_each_kind(net, capsys):
    assert main(["verify", net, "--steps", "1"]) == 0

    out = " ".join(capsys.readouterr().out.split())
    assert "Net under dp=2, tp=2, zero3=2, pp=2, on 2 ranks each" in out


def test_verify_without_a_plan_says_which_kind_is_wrong_and_where(net, capsys, monkeypatch):
    monkeypatch.setattr(comm, "all_reduce_", lambda x, group: x)

    assert main(["verify", net, "--steps", "1", "--trace"]) == 1

    out = " ".join(capsys.readouterr().out.split())
    assert "under tp=2" in out
    assert "the first difference: down / bias < all_reduce down" in out


def test_verify_does_not_search_for_one_rank(net, capsys):
    assert main(["verify", net, "--plan", "auto"]) == 2

    assert "proves nothing" in capsys.readouterr().err


# Rehearsals.


def test_a_plan_file_is_rehearsed(net, capsys):
    assert main(["plan", net, "--plan", "dp=4,tp=4", "--cluster", "2x8xA100-80GB", "-o", "plan.json"]) == 0
    capsys.readouterr()

    assert main(["rehearse", "plan.json", "--model", net, "--steps", "1", "-o", "code"]) == 0

    out = " ".join(capsys.readouterr().out.split())
    assert "dp=4 x tp=4 │ dp=2 x tp=2" in out
    assert "the same; worst: " in out


def test_a_rehearsal_of_a_wrong_program_says_no(net, capsys, monkeypatch):
    monkeypatch.setattr(comm, "all_reduce_", lambda x, group: x)

    assert main(["rehearse", "tp=4", "--model", net, "--steps", "1"]) == 1

    assert "tensors differ" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tp=4"], "rehearsing a plan needs its model"),
        (["none.json", "--model", "net.py:make_model"], "there is no file none.json"),
        (["auto", "--model", "net.py:make_model"], "needs an existing plan"),
    ],
)
def test_what_can_not_be_rehearsed_is_refused(net, capsys, words, message):
    assert main(["rehearse", *words]) == 2

    assert message in capsys.readouterr().err


# Pipelines.


def test_a_schedule_is_drawn_with_its_time_its_waiting_and_what_it_keeps(capsys):
    assert main(["simulate", "--schedule", "1f1b", "--stages", "2", "--microbatches", "3"]) == 0

    out = capsys.readouterr().out
    assert len([line for line in out.splitlines() if " |" in line]) == 2
    assert "12 in all; bubble 25.0 %; at most 2 microbatches in flight on a device" in out


@pytest.mark.parametrize(
    ("schedule", "bubble"),
    [("gpipe", 9.0), ("1f1b", 9.0), ("interleaved", 4.5), ("interleaved=3", 3.0), ("zb", 3.0), ("zbv", 1.5)],
)
def test_schedules_wait_as_long_as_the_page_says(schedule, bubble, capsys):
    """Four stages and eight microbatches, F = B = W = 1: the work is 24."""
    assert main(["simulate", "--schedule", schedule, "--stages", "4", "--microbatches", "8"]) == 0

    assert f"{24 + bubble:g} in all" in capsys.readouterr().out


def test_slow_links_and_stages_count(capsys):
    options = ["simulate", "--stages", "2", "--microbatches", "1", "--forward", "2", "--backward", "3", "--weight", "0"]
    assert main([*options, "--link", "0.5"]) == 0

    assert "11 in all" in capsys.readouterr().out  # 2 + 2 forward, 3 + 3 backward, a message each way


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--schedule", "zbb"], "there is no schedule 'zbb'; the known ones are gpipe"),
        (["--stages", "0"], "--stages 0 must be at least 1"),
        (["--microbatches", "-1"], "--microbatches -1 must be at least 1"),
    ],
)
def test_schedules_that_can_not_be_drawn_are_refused(arguments, message, capsys):
    assert main(["simulate", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_compile_writes_a_file_for_each_stage(net, tmp_path, capsys):
    assert main(["compile", net, "--plan", "pp=2,dp=2", "--microbatches", "2", "-o", "out"]) == 0

    paths = sorted((tmp_path / "out").rglob("*.py"))
    assert [path.name.rsplit("_", 1)[0] for path in paths] == ["train_stage0of2", "train_stage1of2"]
    assert capsys.readouterr().out.count("for 2 devices") == 2
    for path in paths:
        compile(path.read_text(), str(path), "exec")
        assert "2 microbatches" in path.read_text()


def test_a_pipeline_is_planned_written_and_verified(net, tmp_path, capsys):
    assert main(["plan", net, "--plan", "pp=2", "--microbatches", "2", "-o", "plan.json"]) == 0
    data = json.loads((tmp_path / "plan.json").read_text())
    assert (data["policy"], data["microbatches"], data["schedule"]) == ("pp=2", 2, "1f1b")
    assert [batch["devices"] for batch in data["entries"]["train"]] == [[0], [1]]
    assert [batch["ops"][0] for batch in data["entries"]["train"]] == ["up", "down"]

    assert main(["compile", net, "--plan", "plan.json", "-o", "out"]) == 0
    assert len(list((tmp_path / "out").rglob("*.py"))) == 2
    assert main(["verify", net, "--plan", "plan.json", "--steps", "1", "--eval"]) == 0
    assert "on 2 ranks" in capsys.readouterr().out


@pytest.mark.parametrize("plan", ["pp=2", "pp=2,zb", "pp=1+2,dp", "single"])
def test_verify_in_microbatches(net, plan, capsys):
    assert main(["verify", net, "--plan", plan, "--microbatches", "2", "--steps", "1"]) == 0
    assert "the same; worst" in capsys.readouterr().out


def test_verify_notices_a_pipeline_that_is_wrong(net, capsys, monkeypatch):
    """Gradients of one microbatch are lost."""
    monkeypatch.setattr(
        "shardwright.runtime.pipeline.autograd.microbatch_gradient",
        lambda out, gradient, count, at: gradient * (at == 0),
    )

    assert main(["verify", net, "--plan", "pp=2", "--microbatches", "2", "--steps", "1"]) == 1
    assert "tensors differ" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["verify", "--plan", "pp=2", "--microbatches", "3"],
            "a batch of 4 does not divide into 3 microbatches; 1, 2, 4",
        ),
        (
            ["compile", "--plan", "pp=2", "--microbatches", "8"],
            "8 microbatches are more than the batch has samples (4)",
        ),
        (["plan", "--plan", "pp=9"], "9 stages are asked for, and the model can be cut in"),
        (["plan", "--plan", "pp=2", "--ranks", "3"], "--ranks 3 does not fit --plan pp=2, which is for 2"),
    ],
)
def test_pipelines_that_can_not_be_are_refused(net, arguments, message, capsys):
    command, *rest = arguments
    assert main([command, net, *rest]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "net.py:nope", "--plan", "tp=2"], "no function 'nope'; it has Net, make_model"),
        (["plan", "none.py:make", "--plan", "tp=2"], "no file none.py"),
        (["plan", "no.such.module:make", "--plan", "tp=2"], "no module 'no.such.module'"),
        (["plan", "net.py", "--plan", "tp=2"], "does not name a model"),
        (["plan", "net.py:make_alone", "--plan", "tp=2"], "return (module, example)"),
        (["plan", "net.py:make_nothing", "--plan", "tp=2"], "returns a int"),
        (["plan", "net.py:make_model", "--plan", "qp=2"], "known are dp, tp"),
        (["plan", "net.py:make_model", "--plan", "tp=2", "--ranks", "4"], "--ranks 4 does not fit"),
        (["plan", "net.py:make_model", "--plan", "tp=2", "--batch", "0"], "must be at least 1"),
        (["verify", "net.py:make_model", "--plan", "dp=3"], "batch of 4 does not divide"),
        (["plan", "net.py:make_model", "--cluster", "8xA1000"], "did you mean A100"),
        (["plan", "net.py:make_model", "--cluster", "2xH100", "--plan", "tp=4"], "has 2 devices, and 4 are asked for"),
        (["plan", "net.py:make_model", "--cluster", "2xH100", "--memory", "lots"], "memory='lots'"),
        (["plan", "net.py:make_model", "--cluster", "2xH100", "--memory", "1KiB"], "does not fit"),
        (["plan", "net.py:make_model", "--cluster", "2xH100", "--optimizer", "x"], "'x' is no optimizer"),
        (
            ["plan", "net.py:make_model", "--cluster", "2xH100", "--accumulate", "0"],
            "--accumulate 0 must be at least 1",
        ),
        (["diff", "none.json", "none.json"], "none.json can't be read"),
        (["explain", "none.json"], "none.json can't be read"),
        (["plan", "hf:none.json", "--plan", "tp=2"], "none.json"),
    ],
)
def test_what_is_wrong_is_said_in_a_line_and_nothing_is_written(net, tmp_path, capsys, arguments, message):
    before = set(tmp_path.rglob("*.json"))
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
    assert set(tmp_path.rglob("*.json")) == before


def test_a_wrong_command_is_refused():
    with pytest.raises(SystemExit) as ended:
        main(["bogus"])
    assert ended.value.code == 2


def test_a_hugging_face_config_on_meta(tmp_path, capsys):
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 4096,
        "intermediate_size": 11008, "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 2048,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))

    config = f"hf:{tmp_path / 'config.json'}"
    assert main(["plan", config, "--plan", "tp=8", "--batch", "1", "--seq", "64", "--full"]) == 0
    out = capsys.readouterr().out
    assert "LlamaForCausalLM under tp=8" in out
    assert "512 x 4096" in out  # of the 4096 x 4096 of q_proj
    assert "the program returns only the loss" in out

    path = str(tmp_path / "plan.json")
    assert main(["plan", config, "--cluster", "8xA100-80GB", "--seq", "64", "--outputs", "all", "-o", path]) == 0
    out = capsys.readouterr().out
    assert "only the loss" not in out
    assert len(out.splitlines()) <= 46
    assert max(map(len, out.splitlines())) <= 120


def test_a_plan_for_the_loss_alone_is_a_plan_for_all_outputs(tmp_path, capsys):
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 16,
        "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 32,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    named, path = f"hf:{tmp_path / 'config.json'}", str(tmp_path / "plan.json")
    assert main(["plan", named, "--plan", "tp=2", "--batch", "2", "--seq", "8", "-o", path]) == 0
    assert main(["compile", named, "--plan", path, "--batch", "2", "--seq", "8", "-o", str(tmp_path / "out")]) == 0


def test_rows_are_repeated_or_cut():
    x, y = torch.arange(3), torch.arange(6).view(3, 2)
    (a,), kwargs = resize_batch(((x,), {"y": y, "flag": True}), 5)
    assert a.tolist() == [0, 1, 2, 0, 1]
    assert kwargs["y"].shape == (5, 2)
    assert kwargs["flag"] is True
    assert resize_batch(((x,), {}), 2)[0][0].tolist() == [0, 1]


def test_an_input_without_a_batch_dim_is_not_repeated():
    (x, mask), _ = resize_batch(((torch.zeros(3, 2, 4), torch.eye(2)), {}), 5)
    assert (x.shape, mask.shape) == ((5, 2, 4), (2, 2))


@pytest.mark.parametrize("words", [["--help"], ["plan", "--help"], ["train", "--help"], ["--version"]], ids=" ".join)
def test_helps_need_no_torch_and_fit_a_screen(words):
    """Run as the installed command is; without torch the answer is there in a tenth of a second."""
    program = f"import sys; from shardwright.cli import main; sys.argv[1:] = {words}\ntry: main()\nfinally: {NO_TORCH}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert 1 <= len(lines) <= 66 and max(map(len, lines)) < 80


NO_TORCH = "assert not {'torch', 'jsonargparse', 'rich'} & set(sys.modules)"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_help_in_80_columns(command, capsys):
    words = [command, "--help"]
    if command == "train":
        assert main(words) == 0
    else:
        with pytest.raises(SystemExit, match="0"):
            main(words)
    assert max(map(len, capsys.readouterr().out.splitlines())) < 80


def test_a_group_of_settings_is_explained(capsys):
    assert main(["train", "--help", "optimization"]) == 0
    out = capsys.readouterr().out
    assert "  clip_norm         the largest norm of all gradients together" in out
    assert max(map(len, out.splitlines())) < 80
    assert main(["train", "--help", "seed"]) == 0
    assert "everything that is drawn" in capsys.readouterr().out
    assert main(["train", "--help", "optmization"]) == 2
    assert "did you mean 'optimization'" in capsys.readouterr().err


def test_the_settings_of_train_are_those_of_the_trainer():
    names = list(inspect.signature(Trainer.__init__).parameters)[1:]
    assert list(settings()) == names
    hints = typing.get_type_hints(Trainer.__init__)
    for name, (_, kind) in GROUPS.items():
        assert kind in str(hints[name]), name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plna"], "there is no 'plna' as COMMAND; did you mean 'plan'?"),
        (["plan", "net.py:make_model", "--clster", "8xH100"], "no option --clster; did you mean '--cluster'?"),
        (["plan", "net.py:make_model", "--clust=8xH100"], "no option --clust; did you mean '--cluster'?"),
        (["verify", "net.py:make_model", "--dtype", "flot64"], "for --dtype; did you mean 'float64'?"),
        (["checkpoint", "inpect", "run"], "did you mean 'inspect'?"),
        (["diff", "a.json", "b.json", "c.json"], "too many arguments: c.json"),
        (["plan"], "required: model"),
    ],
)
def test_a_misspelt_word_is_answered_with_the_right_one(words, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert message in capsys.readouterr().err


def test_what_can_not_be_captured_is_kept_on_request(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    branching = NET.replace("F.gelu(self.up(x))", "self.gate(self.up(x))") + GATE
    (tmp_path / "gated.py").write_text(branching)
    assert main(["verify", "gated.py:make_gated", "--plan", "dp=2"]) == 2
    assert "sw.opaque(model.gate)" in capsys.readouterr().err
    with pytest.warns(UserWarning, match="model.gate is not captured"):
        assert main(["verify", "gated.py:make_gated", "--plan", "dp=2", "--opaque", "auto"]) == 0
    sys.modules.pop("gated", None)


GATE = """

class Gate(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else x.tanh()


def make_gated():
    made, example = make_model()
    made.gate = Gate()
    return made, example
"""
