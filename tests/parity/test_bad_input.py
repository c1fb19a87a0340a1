"""Bad input gets an error that says which numbers clash and what to do, and leaves nothing behind."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from shardwright.errors import InputError, PlanError, RankError
from shardwright.parallelize import parallelize
from shardwright.parallelize import plan as make_plan
from shardwright.plan.builder import PlanBuilder
from tests.models.zoo import ZOO
from tests.options import grouped
from tests.runtime.ranks import run_ranks

LIMIT = 120.0


def refused(error, size, plan, tmp_path, *words, name="mlp", batch=4, call=None, example=True, **options):
    """The error that all ranks raise, with these words in it; nothing was written or changed by it."""
    cases = [ZOO[name](batch=batch) for _ in range(size)]
    optimizers = [torch.optim.SGD(case.module.parameters(), lr=0.1) for case in cases]
    folder = tmp_path / "generated"

    def run(rank):
        case = cases[rank]
        inputs = {"example": case.args} if example else {}
        model, _ = parallelize(
            case.module, optimizers[rank], plan=plan, **grouped(directory=folder, **inputs, **options)
        )
        if call is not None:
            call(rank, model, case.args)

    with pytest.raises(error) as caught:
        run_ranks(size, run, timeout=LIMIT)
    for word in words:
        assert word in str(caught.value)
    left = [path.name for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert all(re.fullmatch(r"(train|eval)\w*\.py", value) for value in left), left
    if call is None:
        assert left == []
        for case, optimizer in zip(cases, optimizers, strict=True):
            assert optimizer.param_groups[0]["params"] == list(case.module.parameters())
            fresh = ZOO[name](batch=batch).module.state_dict()
            assert all(torch.equal(tensor, fresh[key]) for key, tensor in case.module.state_dict().items())


@pytest.mark.parametrize(("plan", "size"), [("dp=2", 2), ("zero3=2", 2), ("dp=2,tp=2", 4)])
def test_a_batch_that_does_not_divide(tmp_path, plan, size):
    words = (f"a batch of 3 does not divide over 2 data-parallel devices ({plan})", "use a batch of 4")
    refused(PlanError, size, plan, tmp_path, *words, batch=3)


@pytest.mark.parametrize("axis", ["dp", "tp", "zero3"])
def test_an_axis_of_one(tmp_path, axis):
    refused(PlanError, 1, f"{axis}=1", tmp_path, f"'{axis}=1' gives {axis} 1 device", "leave an axis out")


def test_an_axis_larger_than_the_batch():
    module, args, _ = ZOO["mlp"]()
    with pytest.raises(PlanError, match=r"a batch of 4 does not divide over 8 .*use a batch of 8"):
        make_plan(module, example=args, plan="dp=8")


@pytest.mark.parametrize("axis", ["tp", "sp"])
def test_an_axis_larger_than_any_dim(axis):
    module, args, _ = ZOO["mlp"]()
    with pytest.raises(PlanError, match=r"tp=64 is larger than every dim .* at most 32; use tp=32 or less"):
        make_plan(module, example=args, plan=f"{axis}=64")


def test_a_policy_that_splits_a_dim_too_far():
    def policy(graph, cluster):
        builder = PlanBuilder(graph, make_plan(ZOO["mlp"]().module, example=ZOO["mlp"]().args, plan="tp=32").mesh)
        op = next(op for op in builder.ops if op.name.startswith("up"))
        builder.split(op, builder.mesh.axes[0], min(builder.roles(op), key=lambda role: role.size))
        return builder.finish("mine")

    module, args, _ = ZOO["mlp"]()
    with pytest.raises(PlanError, match=r"up .*tp=32 is larger than .* has 4; use a smaller axis"):
        make_plan(module, example=args, plan=policy, cluster=32)


@pytest.mark.parametrize(("plan", "size", "needed"), [("dp=2,tp=2", 2, 4), ("tp=2", 3, 2)])
def test_a_world_of_another_size(tmp_path, plan, size, needed):
    words = (f"is for {needed} devices, but there are {size} processes", f"--nproc-per-node={needed}")
    refused(PlanError, size, plan, tmp_path, *words)


def test_a_plan_file_for_another_world(tmp_path):
    module, args, _ = ZOO["mlp"]()
    make_plan(module, example=args, plan="dp=2").save(tmp_path / "plan.json")
    refused(PlanError, 4, tmp_path / "plan.json", tmp_path, "the plan is for 2 devices", "there are 4 processes")


class Taller(nn.Module):
    """An MLP with one more layer than the plan knows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mid, self.down = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 16)

    def forward(self, x, y):
        return (self.down(self.mid(self.up(x))) - y).square().mean()


@pytest.mark.parametrize("as_file", [True, False])
def test_a_plan_for_another_graph(tmp_path, as_file):
    args = ZOO["mlp"]().args
    other = make_plan(Taller(), example=args, plan="tp=2")
    other.save(tmp_path / "plan.json")
    words = (
        "made for another graph of Taller",
        "fingerprint",
        "make a new plan",
        "mid / linear, which the model does not",
    )
    refused(PlanError, 2, tmp_path / "plan.json" if as_file else other, tmp_path, *words)


def test_a_plan_file_that_is_none(tmp_path):
    (tmp_path / "plan.json").write_text('{"version": 1, "mesh": {"dp": 0}, "colour": "red"}')
    words = ("colour is unknown", "policy is missing", "mesh.dp should be a whole number from 1")
    refused(PlanError, 2, tmp_path / "plan.json", tmp_path, *words)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_data_of_another_dtype_than_the_example(tmp_path, plan):
    def call(rank, model, args):
        model(args[0].double(), args[1])

    words = ("x is float64, but the model was compiled for float32", "x.to(torch.float32)")
    refused(InputError, 2, plan, tmp_path, *words, call=call)


def test_tokens_that_are_no_integers_any_more(tmp_path):
    def call(rank, model, args):
        model.eval()
        model(args[0].float(), args[1].int())

    words = ("idx is float32, but the model was compiled for int64", "target is int32", "target.to(torch.int64)")
    refused(InputError, 2, "tp=2", tmp_path, *words, name="gpt", call=call)


def test_ranks_that_pass_different_data_as_the_same(tmp_path):
    def call(rank, model, args):
        model(args[0] + rank, args[1])

    words = ('inputs="global"', "rank 1 passes another batch than rank 0", 'inputs="per_replica"', 'inputs="per_rank"')
    refused(InputError, 2, "dp=2", tmp_path, *words, call=call)


def test_groups_that_pass_the_same_rows(tmp_path):
    def call(rank, model, args):
        model(*args)

    words = ('inputs="per_replica"', "but all pass the same", "model.data_rank", 'inputs="global"')
    refused(InputError, 2, "dp=2", tmp_path, *words, call=call, inputs="per_replica")


def test_ranks_of_one_group_that_pass_different_rows(tmp_path):
    def call(rank, model, args):
        model(args[0] + rank, args[1])

    words = ('inputs="per_replica"', "rank 1 passes another x than rank 0", "ranks of one replica", "model.data_rank")
    refused(InputError, 4, "dp=2,tp=2", tmp_path, *words, call=call, inputs="per_replica")


def test_an_unknown_mode_and_a_senseless_accumulate(tmp_path):
    refused(InputError, 1, "single", tmp_path, "inputs='column' is not a mode", '"per_rank"', inputs="column")
    refused(InputError, 1, "single", tmp_path, "accumulate=0", "use 1", accumulate=0)


# Different shapes: on processes, since what a wrong way does here is wait.


def uneven(rank, directory, inputs, warm):
    """A good call or none, then one in which rank 1 passes more rows."""
    module, args, _ = ZOO["mlp"]()
    model = parallelize(module, plan="tp=2", compile={"directory": directory}, inputs=inputs)
    if warm:
        mine = tuple(argument[2 * rank : 2 * rank + 2] for argument in args) if inputs == "per_rank" else args
        model(*mine).backward()
    model(*(argument[: 2 + 2 * rank] for argument in args)).backward()


@pytest.mark.parametrize(("inputs", "warm"), [("global", False), ("global", True), ("per_rank", True)])
def test_ranks_that_pass_different_shapes(pools, tmp_path, inputs, warm):
    answers = pools[2].try_run(uneven, str(tmp_path), inputs, warm, timeout=LIMIT)
    errors = [answer[0] for fine, answer in answers if not fine]
    assert len(errors) == 2
    assert any(isinstance(error, InputError) for error in errors)
    for error in errors:
        assert isinstance(error, InputError | RankError)
        assert "pass inputs of different shapes" in str(error)
        assert "[[2, 16], [2, 16]]" in str(error) or "[[4, 16], [4, 16]]" in str(error)
        assert "drop_last=True" in str(error)
