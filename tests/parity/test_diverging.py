"""Ranks that diverge are stopped: a wrong batch in any call, other options, another model, another package."""

from __future__ import annotations

import copy
from functools import partial
from importlib import import_module

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwright.compile import agreement
from shardwright.errors import DriftError, InputError
from shardwright.options import MOVED
from shardwright.parallelize import parallelize
from tests.models.zoo import ZOO
from tests.options import grouped
from tests.runtime.ranks import run_processes, run_ranks

LIMIT = 120.0
compiler = import_module("shardwright.compile.compiler")


def batches_of(name, rank, wrong, count=8):
    """So many batches, of which rank 1 has another one in call `wrong`, in its last input."""
    generator, args = torch.Generator().manual_seed(3), ZOO[name]().args
    collected = []
    for call in range(1, count + 1):
        order = torch.randperm(args[0].shape[0], generator=generator)
        batch = [tensor[order].clone() for tensor in args]
        if (call, rank) == (wrong, 1):
            batch[-1] = batch[-1].roll(1, 0)  # the same samples in another order
        collected.append(batch)
    return collected


def train(rank, name, plan, directory, wrong=7, **options):
    """Train until a call is refused: the error, the number of steps that were made, and whether it changed anything."""
    case = ZOO[name]()
    optimizer = torch.optim.SGD(case.module.parameters(), lr=0.1)
    model, optimizer = parallelize(case.module, optimizer, plan=plan, **grouped(directory=directory, **options))
    steps, before = 0, None
    for call, batch in enumerate(batches_of(name, rank, wrong), start=1):
        try:
            loss = model(*batch)
            before = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
            loss.backward()
            if call % options.get("accumulate", 1) == 0:
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
        except InputError as error:
            stored = dict(model.named_parameters())
            return str(error), steps, all(torch.equal(stored[key].detach(), was) for key, was in before.items())
    return "", steps, False


def assert_named(errors, path):
    for text, steps, unchanged in errors:
        assert text.startswith(f"in call 7 of the model rank 1 passes another batch than rank 0: {path} differs")
        assert (steps, unchanged) == (6, True)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero3=2", "zero1=2"])
def test_a_wrong_batch_is_named_on_all_ranks_before_a_parameter_changes(tmp_path, plan):
    torch.manual_seed(0)
    assert_named(run_ranks(2, train, "mlp", plan, tmp_path, timeout=LIMIT), "y")


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero3=2", "pp=2"])
def test_a_wrong_batch_is_named_on_processes(pools, tmp_path, plan):
    assert_named(pools[2].run(train, "gpt", plan, str(tmp_path), timeout=LIMIT), "target")


def test_batches_that_are_the_same_are_never_refused(tmp_path):
    for text, steps, _ in run_ranks(2, train, "mlp", "dp=2", tmp_path, 0, timeout=LIMIT):
        assert (text, steps) == ("", 8)


def test_a_wrong_batch_among_calls_whose_gradients_are_added_up(tmp_path):
    accumulating = partial(train, accumulate=2)
    for text, steps, _ in run_ranks(2, accumulating, "mlp", "dp=2", tmp_path, 6, timeout=LIMIT):
        assert text.startswith("in call 6 of the model rank 1") and steps == 2


def test_a_wrong_batch_of_an_evaluation_is_named_at_the_next_call(tmp_path):
    cases = [ZOO["mlp"]() for _ in range(2)]

    def run(rank):
        model = parallelize(cases[rank].module, plan="dp=2", compile={"directory": tmp_path}).eval()
        with torch.no_grad():
            for call, batch in enumerate(batches_of("mlp", rank, 3), 1):
                try:
                    model(*batch)
                except InputError as error:
                    return call, str(error)
        return None, ""

    for call, text in run_ranks(2, run):
        assert call == 4 and text.startswith("in call 3 of the model rank 1 passes another batch")


def test_the_last_wrong_batch_is_named_when_the_model_is_saved(tmp_path):
    cases = [ZOO["mlp"]() for _ in range(2)]

    def run(rank):
        model = parallelize(cases[rank].module, plan="dp=2", compile={"directory": tmp_path}).eval()
        with torch.no_grad():
            for batch in batches_of("mlp", rank, 8):
                model(*batch)
        model.full_state_dict()

    with pytest.raises(InputError, match="in call 8 of the model rank 1 passes another batch"):
        run_ranks(2, run)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero3=2"])
def test_a_parameter_that_is_frozen_on_one_rank_is_named(tmp_path, plan):
    cases = [ZOO["mlp"]() for _ in range(2)]

    def run(rank):
        model = parallelize(cases[rank].module, plan=plan, compile={"directory": tmp_path})
        for call, batch in enumerate(batches_of("mlp", rank, 0), 1):
            if (call, rank) == (3, 1):
                next(iter(model.parameters())).requires_grad_(False)
            try:
                model(*batch).backward()
            except InputError as error:
                return call, str(error)
        return None, ""

    for call, text in run_ranks(2, run):
        assert call == 3 and text.startswith("in call 3 of the model rank 1 passes ") and "frozen parameters" in text


def test_parameters_that_are_frozen_on_all_ranks_are_fine(tmp_path):
    cases = [ZOO["mlp"]() for _ in range(2)]

    def run(rank):
        model = parallelize(cases[rank].module, plan="dp=2", compile={"directory": tmp_path})
        for call, batch in enumerate(batches_of("mlp", rank, 0), 1):
            next(iter(model.parameters())).requires_grad_(call % 2 == 0)
            model(*batch).backward()
        return call

    assert run_ranks(2, run) == [8, 8]


def test_ranks_of_one_replica_must_pass_the_same_samples_in_every_call(tmp_path):
    cases = [ZOO["mlp"]() for _ in range(4)]

    def run(rank):
        model = parallelize(cases[rank].module, plan="dp=2,tp=2", inputs="per_replica", compile={"directory": tmp_path})
        for call in range(1, 5):
            x, y = (tensor.chunk(2)[rank // 2] + call for tensor in cases[rank].args)
            try:
                model(x + (1 if (call, rank) == (3, 3) else 0), y).backward()
            except InputError as error:
                return str(error)
        return ""

    for text in run_ranks(4, run):
        assert text.startswith("in call 3 of the model rank 3 passes another x than rank 2;")
        assert "model.data_rank" in text


@pytest.mark.parametrize(("every", "where"), [("3", "in call 6"), ("0", "")])
def test_calls_may_be_compared_now_and_then(tmp_path, monkeypatch, every, where):
    monkeypatch.setenv("SHARDWRIGHT_COMPARE_INPUTS", every)
    wrong = 6 if every == "3" else 7
    for text, _, _ in run_ranks(2, train, "mlp", "dp=2", tmp_path, wrong, timeout=LIMIT):
        assert text.startswith(where) and bool(text) == bool(where)


def evaluate_and_train(rank, directory, wrong):
    """Evaluations in inference mode between steps; the error, if there is one."""
    case = ZOO["mlp"]()
    optimizer = torch.optim.SGD(case.module.parameters(), lr=0.1)
    model, optimizer = parallelize(
        case.module, optimizer, plan="dp=2", compile={"directory": directory}, example=case.args
    )
    try:
        for batch in batches_of("mlp", rank, wrong):
            model.eval()
            with torch.inference_mode():
                model(*batch)
            model.train()
            model(*batch).backward()
            optimizer.step()
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("shared", ["1", "0"])
def test_inference_between_steps(tmp_path, monkeypatch, shared):
    monkeypatch.setenv("SHARDWRIGHT_SHARED_MEMORY", shared)
    assert run_processes(2, evaluate_and_train, str(tmp_path), 0, timeout=LIMIT) == ["", ""]
    for text in run_processes(2, evaluate_and_train, str(tmp_path), 4, timeout=LIMIT):
        assert text.startswith("in call 7 of the model rank 1 passes another batch than rank 0: y differs")


# Values that are no tensors.


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, scale=1.0, flip=False, name=None):
        x = self.linear(x) * scale
        return (-x if flip else x).square().mean()


@pytest.mark.parametrize(
    ("mine", "words"),
    [
        ({"scale": 3.0}, "scale is 2.0 on rank 0 and 3.0 on rank 1"),
        ({"flip": True}, "flip is False on rank 0 and True on rank 1"),
        ({"name": "other"}, "name is None on rank 0 and 'other' on rank 1"),
    ],
)
@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_other_values_of_a_new_call_are_refused(tmp_path, plan, mine, words):
    torch.manual_seed(0)
    net, usual = Scaled(), {"scale": 2.0, "flip": False, "name": None}

    def run(rank):
        model = parallelize(copy.deepcopy(net), plan=plan, compile={"directory": tmp_path})
        try:
            model(torch.ones(4, 4), **usual | (mine if rank else {}))
        except InputError as error:
            return str(error)

    first, second = run_ranks(2, run)
    assert words in first and "pass the same everywhere" in second


def test_other_values_of_calls_that_are_known_are_refused(tmp_path):
    torch.manual_seed(0)
    net = Scaled()

    def run(rank):
        model = parallelize(copy.deepcopy(net), plan="dp=2", compile={"directory": tmp_path})
        for flip in (True, False):
            model(torch.ones(4, 4), flip=flip).backward()
        try:
            model(torch.ones(4, 4), flip=bool(rank)).backward()
        except InputError as error:
            return str(error)

    for text in run_ranks(2, run):
        assert text.startswith("in call 3 of the model rank 1 runs Scaled") or "passes True as flip" in text


# What is compared when a program is compiled.


def diverge(directory, size=2, module=None, rates=(0.1,) * 4, **by_rank):
    """The error of every rank, if each has its own of some options."""
    torch.manual_seed(0)
    case = ZOO["mlp"]()
    nets = [copy.deepcopy((module or (lambda rank: case.module))(rank)) for rank in range(size)]

    def run(rank):
        optimizer = torch.optim.SGD(nets[rank].parameters(), lr=rates[rank])
        options = {"plan": "dp=2", **{name: values[rank] for name, values in by_rank.items()}}
        try:
            parallelize(nets[rank], optimizer, example=case.args, **grouped(directory=directory / str(rank), **options))
        except DriftError as error:
            return str(error)

    return run_ranks(size, run, timeout=LIMIT)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("plan", ("dp=2", "tp=2")), ("plan", ("dp=2", "auto")), ("inputs", ("global", "per_rank")), ("seed", (0, 1)),
        ("accumulate", (1, 2)), ("precision", (None, "bf16-mixed")), ("outputs", ("all", "scalars")),
        ("unbatched", (None, [])),
    ],
)  # fmt: skip
def test_options_that_differ_are_named_on_all_ranks(tmp_path, name, values):
    for text in diverge(tmp_path, **{name: values}):
        assert text.startswith(f"the ranks have different versions and settings ({__file__}:")
        assert "(parallelize(nets[rank]" in text and "); install the same packages" in text
        assert len(text.splitlines()) == 2
        if name != "precision":
            kept = ["()" if value == [] else str(value) for value in values]
            assert f"  - {MOVED.get(name, name)}: {kept[0]} on rank 0, {kept[1]} on rank 1" in text


def test_optimizers_that_differ_are_named_on_all_ranks(tmp_path):
    for text in diverge(tmp_path, rates=(0.1, 0.2)):
        assert "  - optimizer, group 0, lr: 0.1 on rank 0, 0.2 on rank 1" in text


def test_packages_that_differ_are_named_on_all_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(agreement, "versions", lambda: {"torch": f"2.13.{dist.get_rank() // 2}"})
    for text in diverge(tmp_path, size=4, plan=["tp=4"] * 4):
        assert "  - torch: 2.13.0 on ranks 0, 1, 2.13.1 on ranks 2, 3" in text


def test_models_that_differ_are_named_on_all_ranks(tmp_path):
    def module(rank):
        net = ZOO["mlp"]().module
        net.up.bias.requires_grad_(rank == 0)
        return net

    for text in diverge(tmp_path, module=module):
        assert text.startswith(f"the ranks have different programs ({__file__}:")
        assert "build the same model everywhere" in text
        assert "  - graph: MLP " in text


def test_code_that_differs_is_named_on_all_ranks(tmp_path, monkeypatch):
    plain = compiler.generate

    def generate(program, directory):
        actual = plain(program, directory)
        text = actual.path.read_text().replace(".gelu(", ".silu(") if dist.get_rank() else None
        return plain(program, directory, text) if text else actual

    monkeypatch.setattr(compiler, "generate", generate)
    for text in diverge(tmp_path):
        assert "  - program: " in text and "graph" not in text


def test_comments_in_code_may_differ():
    code = '"""A program.\n\nplan       dp=2\n"""\n\nx = 1  # model.py:3\n'
    moved = '"""A program.\n\nplan       dp=2\n"""\n\nx = 1  # elsewhere/model.py:3\n'
    assert agreement.code_digest(code) == agreement.code_digest(moved)
    assert agreement.code_digest(code) != agreement.code_digest(code.replace("x = 1", "x = 2"))
