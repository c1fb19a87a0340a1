"""The three input modes in a loop, and state: names, keys, whole state dicts, checkpoints under another plan."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn

from shardwright.parallelize import parallelize
from shardwright.runtime.parameters.state_values import ShardTensor
from tests.models.zoo import ZOO
from tests.runtime.ranks import run_ranks

from .looped import gradients
from .threaded import world_of


def single(name, loss=lambda model, args: model(*args)):
    """The loss and the gradients of the whole batch on one device."""
    case = ZOO[name](dtype=torch.float64)
    actual = loss(case.module, case.args)
    actual.backward()
    return [actual.detach(), *gradients(case.module)]


def cases_of(name, count, **options):
    """A copy for each rank, made before: threads share torch's generator."""
    return [ZOO[name](dtype=torch.float64, **options) for _ in range(count)]


def assert_close(actual, wanted):
    scale = max(float(expected.abs().max()) for expected in wanted)
    assert len(actual) == len(wanted)
    for mine, other in zip(actual, wanted, strict=True):
        assert float((mine - other).abs().max()) <= 1e-10 * scale


def rows_of(args, part, parts):
    size = args[0].shape[0] // parts
    return tuple(argument[part * size : (part + 1) * size] for argument in args)


@pytest.mark.parametrize("plan", ["dp=2", "zero3=2", "dp=2,tp=2"])
@pytest.mark.parametrize("name", ["gpt_ignore", "contrastive"])
def test_rows_of_every_group_give_the_exact_global_mean(tmp_path, plan, name):
    cases = cases_of(name, world_of(plan))

    def run(rank):
        case = cases[rank]
        group = rank // (world_of(plan) // 2)
        mine = rows_of(case.args, group, 2)
        model = parallelize(case.module, plan=plan, example=mine, inputs="per_replica", compile={"directory": tmp_path})
        assert (model.data_rank, model.data_size) == (group, 2)
        loss = model(*rows_of(case.args, model.data_rank, model.data_size))
        loss.backward()
        return [loss.detach(), *gradients(model)]

    for result in run_ranks(world_of(plan), run, timeout=120):
        assert_close(result, single(name))


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,tp=2"])
def test_a_loss_outside_of_the_model_has_the_gradient_of_the_mean_over_groups(tmp_path, plan):
    def outside(model, args):
        return F.cross_entropy(model(args[0]).flatten(0, 1), args[1].flatten())

    cases = cases_of("gpt", world_of(plan))

    def run(rank):
        case = cases[rank]
        group = rank // (world_of(plan) // 2)
        mine = rows_of(case.args, group, 2)
        model = parallelize(
            case.module, plan=plan, example=mine[:1], inputs="per_replica", compile={"directory": tmp_path}
        )
        loss = outside(model, mine)
        loss.backward()
        return group, loss.detach(), gradients(model)

    _, *wanted = single("gpt", outside)
    results = run_ranks(world_of(plan), run, timeout=120)
    for _, _, value in results:
        assert_close(value, wanted)
    losses = {group: loss for group, loss, _ in results}
    assert losses[0] != losses[1]  # each group sees the loss of its rows, as with DDP
    assert_close([(losses[0] + losses[1]) / 2], [single("gpt", outside)[0]])


@pytest.mark.parametrize("plan", ["tp=2", "dp=2"])
def test_gathered_rows_are_one_global_batch(tmp_path, plan):
    cases = cases_of("gpt_ignore", 2)

    def run(rank):
        case = cases[rank]
        model = parallelize(case.module, plan=plan, inputs="per_rank", compile={"directory": tmp_path})
        loss = model(*rows_of(case.args, rank, 2))
        loss.backward()
        return [loss.detach(), *gradients(model)]

    for result in run_ranks(2, run, timeout=120):
        assert_close(result, single("gpt_ignore"))


# Names and state.


class Partly(nn.Module):
    """Has a parameter that no step uses, a buffer that a state dict has, and one that it has not."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.idle = nn.Linear(4, 4)
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("passing", torch.ones(4), persistent=False)

    def forward(self, x):
        return (self.up(x * self.scale + self.passing)).square().mean()


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero2=2", "zero3=2"])
def test_a_parameter_that_is_never_used_has_no_gradient_and_stays(tmp_path, plan):
    torch.manual_seed(0)
    net = Partly().double()
    x = torch.randn(4, 4, dtype=torch.float64)

    def run(rank):
        module = copy.deepcopy(net)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.1)
        model, optimizer = parallelize(module, optimizer, plan=plan, compile={"directory": tmp_path})
        for _ in range(2):
            model(x).backward()
            by_key = {key: p.grad is None for key, p in model.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
        return by_key, model.full_state_dict()

    for missing, whole in run_ranks(2, run):
        assert missing == {"up.weight": False, "up.bias": False, "idle.weight": True, "idle.bias": True}
        assert torch.equal(whole["idle.weight"], net.idle.weight)
        assert not torch.equal(whole["up.weight"], net.up.weight)


@pytest.mark.parametrize("name", ["gpt", "resnet", "hf_gpt2"])
def test_names_and_keys_are_the_original_ones(tmp_path, name):
    case = ZOO[name]()
    cases = [ZOO[name]() for _ in range(2)]

    def run(rank):
        module, args, kwargs = cases[rank]
        model = parallelize(module, plan="tp=2", example=(args, kwargs), compile={"directory": tmp_path})
        names = [[key for key, _ in value()] for value in (model.named_parameters, model.named_buffers)]
        return names, list(model.state_dict()), model.full_state_dict()

    for (parameters, buffers), keys, whole in run_ranks(2, run, timeout=120):
        assert parameters and set(parameters) == {key for key, _ in case.module.named_parameters()}
        assert set(buffers) == {key for key, _ in case.module.named_buffers()}
        assert set(keys) == set(case.module.state_dict())
        fresh = ZOO[name](seed=1).module
        fresh.load_state_dict(whole)
        for key, tensor in fresh.state_dict().items():
            assert torch.equal(tensor, case.module.state_dict()[key]), key


@pytest.mark.parametrize(("before", "after"), [("tp=2", "zero3=2"), ("zero3=2", "dp=2"), ("dp=2", "tp=2")])
def test_a_checkpoint_goes_from_one_plan_to_another(pools, tmp_path, before, after):
    saved = pools[2].run(save, before, str(tmp_path), timeout=120)
    for result in pools[2].run(load, after, str(tmp_path), timeout=120):
        assert result.keys() == saved[0].keys()
        for key, value in result.items():
            assert torch.equal(value, saved[0][key]), key


def save(rank, plan, directory):
    case = ZOO["gpt"]()
    optimizer = torch.optim.SGD(case.module.parameters(), lr=0.1)
    model, optimizer = parallelize(case.module, optimizer, plan=plan, compile={"directory": f"{directory}/generated"})
    model(*case.args).backward()
    optimizer.step()
    values = model.state_dict()
    assert any(isinstance(value, ShardTensor) for value in values.values()) == (plan == "tp=2")
    dcp.save(values, checkpoint_id=f"{directory}/saved")
    return model.full_state_dict()


def load(rank, plan, directory):
    case = ZOO["gpt"](seed=7)
    model = parallelize(case.module, plan=plan, example=case.args, compile={"directory": f"{directory}/generated"})
    values = model.state_dict()
    dcp.load(values, checkpoint_id=f"{directory}/saved")
    model.load_state_dict(values)
    return model.full_state_dict()
