"""Optimizers come back as they were saved; those of several stages are one in a checkpoint."""

from __future__ import annotations

import copy

import pytest
import torch

import shardwright as sw
from shardwright.checkpoint.key_owners import KeyOwners
from shardwright.checkpoint.optimizers import merge_optimizers
from shardwright.errors import CheckpointError

from .little import little, train


def test_state_comes_back_and_what_had_none_has_none_again(tmp_path):
    net, optimizer = little()
    net.down.bias.requires_grad_(False)
    train(net, optimizer, 2)
    optimizer.param_groups[0]["lr"] = 0.25
    sw.save(tmp_path / "x", net, optimizer)
    wanted = copy.deepcopy(optimizer.state_dict())

    net.down.bias.requires_grad_(True)
    train(net, optimizer, 1)
    optimizer.param_groups[0]["lr"] = 0.5
    sw.load(tmp_path / "x", net, optimizer)

    state = optimizer.state_dict()
    assert state["param_groups"] == wanted["param_groups"]
    assert state["state"].keys() == wanted["state"].keys() and len(wanted["state"]) == len(list(net.parameters())) - 1
    for number, expected in wanted["state"].items():
        assert expected.keys() == state["state"][number].keys()
        assert all(torch.equal(value, state["state"][number][key]) for key, value in expected.items())


@pytest.mark.parametrize(("dtype", "moment"), [(torch.float64, torch.float64), (torch.float32, torch.float32)])
def test_moments_have_the_dtype_of_their_parameter_and_steps_their_own(tmp_path, dtype, moment):
    net, optimizer = little()
    train(net, optimizer, 1)
    sw.save(tmp_path / "x", net, optimizer)

    other = little()[0].to(dtype)
    fresh = torch.optim.AdamW(other.parameters())
    sw.load(tmp_path / "x", other, fresh)

    for leaf, value in fresh.state.items():
        assert value["exp_avg"].dtype == leaf.dtype == moment
        assert value["step"].dtype == torch.float32 and value["step"].device.type == "cpu"


def test_an_optimizer_of_other_groups_is_refused_with_all_its_faults(tmp_path):
    net, _ = little()
    parameters = dict(net.named_parameters())
    optimizer = torch.optim.SGD([{"params": [parameters["up.weight"]]}, {"params": [parameters["up.bias"]]}], lr=0.1)
    sw.save(tmp_path / "x", net, optimizer)
    both = [parameters["up.bias"], parameters["up.weight"]]
    more = [parameters["down.bias"]]

    with pytest.raises(CheckpointError) as error:
        sw.load(tmp_path / "x", net, torch.optim.SGD([{"params": both}, {"params": more}], lr=0.1))

    assert "the parameters of group 0 were in groups [0, 1] of 2" in str(error.value)
    assert "group 1 has down.bias, which the saved optimizer did not train" in str(error.value)


@pytest.mark.parametrize(("empty", "fine"), [(0, True), (1, False), (2, False)])
def test_a_group_without_parameters_has_its_place_among_the_saved_ones(tmp_path, empty, fine):
    """As on a stage that has none of a group's: it takes what was saved of the group with its number."""
    net, _ = little()
    sw.save(tmp_path / "x", net, torch.optim.SGD(net.parameters(), lr=0.1))
    groups = [{"params": list(net.parameters()), "lr": 0.3}, *({"params": [], "lr": 0.5} for _ in range(empty))]
    optimizer = torch.optim.SGD(groups, lr=0.3)
    if fine:
        sw.load(tmp_path / "x", net, optimizer)
        assert optimizer.param_groups[0]["lr"] == 0.1
    else:
        with pytest.raises(CheckpointError, match=r"the parameters of group 1 were in groups \[1\] of 1"):
            sw.load(tmp_path / "x", net, optimizer)


def message(state: list[str], *groups: list[str]) -> dict:
    """What a rank says of its optimizer."""
    return {
        "kind": "AdamW",
        "groups": [{"lr": 0.1, "params": names} for names in groups],
        "state": dict.fromkeys(state),
    }


def test_stages_with_other_numbers_of_groups_are_refused():
    census = KeyOwners(little()[0])
    for value, other in ((["up.weight"], []), ([], ["up.weight"])):
        with pytest.raises(CheckpointError, match=r"with \d and \d param groups; create the optimizer before"):
            merge_optimizers([message([], value), message([], other, [])], census)


def test_groups_have_the_parameters_of_all_stages_in_the_order_of_the_model():
    census = KeyOwners(little()[0])
    first, second = message(["down.bias"], ["down.bias"], ["down.weight"]), message(["up.bias"], ["up.bias"], [])

    actual = merge_optimizers([first, second], census)

    assert [group["params"] for group in actual["groups"]] == [["up.bias", "down.bias"], ["down.weight"]]
    assert actual["state"].keys() == {"down.bias", "up.bias"}
    assert first["groups"][0]["params"] == ["down.bias"], "what was said is left as it is"


def test_one_optimizer_keeps_the_order_of_its_own():
    (group,) = merge_optimizers([message([], ["down.bias", "up.bias"])], KeyOwners(little()[0]))["groups"]
    assert group["params"] == ["down.bias", "up.bias"]
