"""Checks of a kind of storage that is not in the package: run by `test_add_a_kind` with a copy that has it."""

from __future__ import annotations

import traceback

import torch

import shardwright as sw
from shardwright.emit import emit
from shardwright.plan import build_plan, parse_plan_string
from shardwright.plan.file import read
from shardwright.plan.lowering import lower
from shardwright.plan.request import PlanRequest
from shardwright.planning import cluster_of, priced
from shardwright.storage import storage_kind
from tests.models.zoo import ZOO
from tests.plan.graphs import analysis_of, graph_of
from tests.runtime.ranks import run_ranks

KIND = storage_kind("offload")


def compile_gpt(plan: str, folder: str = "generated"):
    case = ZOO["gpt"](dtype=torch.float64)
    optimizer = torch.optim.AdamW(case.module.parameters(), lr=0.01)
    return sw.parallelize(
        case.module, optimizer, plan=plan, example=(case.args, case.kwargs), compile={"directory": folder}
    )


def steps(run, count: int) -> None:
    model, optimizer = run
    for number in range(count):
        model(*ZOO["gpt"](dtype=torch.float64, seed=number).args).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def parity() -> None:
    case = ZOO["gpt"](dtype=torch.float64)
    report = sw.verify(case.module, "offload=2", example=(case.args, case.kwargs), optimizer="adamw")
    assert report.passed, str(report)


def memory_of_its_own() -> None:
    def body(rank: int) -> None:
        model, optimizer = compile_gpt("offload=2")
        steps((model, optimizer), 1)
        parameters = dict(model.named_parameters())
        matrix = parameters["blocks.0.up.weight"]
        assert isinstance(matrix.spec.storage, KIND)
        assert matrix.shard.device.type == "cpu" and matrix.shard.numel() * 2 == matrix.numel()
        assert matrix.shard.untyped_storage().data_ptr() != matrix.untyped_storage().data_ptr()
        updated = {id(leaf) for group in optimizer.param_groups for leaf in group["params"]}
        assert {id(parameter.shard) for parameter in parameters.values()} == updated

    run_ranks(2, body, timeout=200)


def checkpoint() -> None:
    def body(rank: int) -> list[dict[str, torch.Tensor]]:
        first = compile_gpt("offload=2")
        steps(first, 2)
        sw.save("saved", *first)
        steps(first, 1)
        results = [first[0].full_state_dict()]
        for plan in ("zero2=2", "zero3=2", "offload=2"):
            other = compile_gpt(plan)
            sw.load("saved", *other)
            steps(other, 1)
            results.append(other[0].full_state_dict())
        return results

    for first, *others in run_ranks(2, body, timeout=300):
        for other in others:
            for key, tensor in first.items():
                assert torch.allclose(tensor, other[key], rtol=0, atol=1e-12), key


def files() -> None:
    graph, analysis = graph_of("gpt"), analysis_of("gpt")
    plan = build_plan(graph, parse_plan_string("offload=2"), analysis)
    assert read(plan.to_json(), graph).storage == plan.storage
    assert {stored.written()["dp"] for stored in plan.storage.values()} == {"offload"}
    assert 'zero={"dp": "offload"}' in emit(lower(graph, plan, analysis)).text


def price() -> None:
    graph, analysis = graph_of("gpt"), analysis_of("gpt")
    cluster = cluster_of(2)
    request = PlanRequest(cluster=cluster)

    def predicted(text: str):
        return priced(build_plan(graph, parse_plan_string(text), analysis), analysis, request, cluster).predicted[
            "train"
        ]

    here, there = predicted("zero2=2"), predicted("offload=2")
    assert there["memory"]["optimizer"] == 0 < here["memory"]["optimizer"]
    assert there["memory"]["peak"] < here["memory"]["peak"]
    assert there["memory"]["parameters"] == here["memory"]["parameters"]
    assert there["seconds"] > here["seconds"]  # copies to the host and back


if __name__ == "__main__":
    for check in (parity, memory_of_its_own, checkpoint, files, price):
        try:
            check()
            print(f"{check.__name__}: passed")
        except Exception:  # the others run all the same
            print(f"{check.__name__}:", traceback.format_exc())
