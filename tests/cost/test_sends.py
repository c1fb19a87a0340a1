"""What the cost model says that algorithms send, against what the runtime sends."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwright import runtime
from shardwright.capture import experts as mark_experts
from shardwright.cost import AlgorithmCollective, TrainingSetup, algorithm_collectives
from shardwright.layout import Axis, Block, Mesh, make_shard
from shardwright.runtime.algorithms.experts import experts
from shardwright.runtime.collectives import comm
from shardwright.runtime.world import Groups
from tests.cost.calls import signatures
from tests.runtime.ranks import run_ranks

RANKS = 2
MESH = Mesh(axes=(Axis(name="x", size=RANKS),))
Sent = tuple[str, int]
"""A collective, and the elements that a rank hands to it."""


def sent(rank: int, run) -> tuple[list[Sent], list[Sent]]:
    """What one rank sends, forward and backward."""
    group = Groups(MESH, [("x",)])["x"]
    with comm.recording() as forward:
        out = run(rank, group)
    with comm.recording() as backward:
        out.sum().backward()
    return [(kind, math.prod(shape)) for kind, _, shape in forward], [
        (kind, math.prod(shape)) for kind, _, shape in backward
    ]


def sends_of(sends: tuple[AlgorithmCollective, ...], when: str) -> list[tuple[str, float]]:
    assert all(sent.axes == ("x",) for sent in sends)
    return [(sent.collective, sent.bytes) for sent in sends if sent.when == when]


def choice_of(signature, algorithm: str) -> dict[str, str]:
    (label,) = (label for label, algorithm_of in signature.rule.algorithms.items() if algorithm_of.name == algorithm)
    return {"x": next(role.name for role in signature.roles if role.label == label)}


class Loss(nn.Module):
    def __init__(self, smoothing: float = 0.0) -> None:
        super().__init__()
        self.smoothing = smoothing

    def forward(self, logits, target):
        return F.cross_entropy(logits, target, label_smoothing=self.smoothing)


def loss_of(smoothing: float = 0.0):
    by_op = signatures(Loss(smoothing), torch.zeros(6, 10, requires_grad=True), torch.zeros(6, dtype=torch.long))
    return by_op["aten.cross_entropy_loss.default"]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_over_split_classes(smoothing):
    def run(rank, group):
        logits = torch.zeros(6, 5, requires_grad=True)
        return runtime.cross_entropy(logits, torch.arange(6), classes=group, label_smoothing=smoothing)

    signature = loss_of(smoothing)
    sends = algorithm_collectives(signature, choice_of(signature, "classes"), MESH, TrainingSetup())
    forward, backward = run_ranks(RANKS, sent, run)[0]
    assert sends_of(sends, "forward") == [(kind, 4 * elements) for kind, elements in forward]
    assert sends_of(sends, "backward") == backward == []


class LogSumExp(nn.Module):
    def forward(self, logits):
        return torch.logsumexp(logits, -1)


def test_logsumexp_over_split_classes():
    def run(rank, group):
        return runtime.logsumexp(torch.zeros(6, 5, requires_grad=True), -1, group)

    signature = signatures(LogSumExp(), torch.zeros(6, 10, requires_grad=True))["aten.logsumexp.default"]
    sends = algorithm_collectives(signature, choice_of(signature, "classes"), MESH, TrainingSetup())
    forward, backward = run_ranks(RANKS, sent, run)[0]
    assert sends_of(sends, "forward") == [(kind, 4 * elements) for kind, elements in forward]
    assert sends_of(sends, "backward") == backward == []


def test_a_mean_over_split_rows_sends_a_count():
    def run(rank, group):
        logits = torch.zeros(3, 10, requires_grad=True)
        return runtime.cross_entropy(logits, torch.arange(3), samples=group)

    signature = loss_of()
    sends = algorithm_collectives(signature, choice_of(signature, "samples"), MESH, TrainingSetup())
    forward, _ = run_ranks(RANKS, sent, run)[0]
    assert forward == [("all_reduce", 1)]
    assert sends == (AlgorithmCollective("all_reduce", 8, ("x",), "forward"),)


def test_batch_norm_over_split_rows():
    def run(rank, group):
        x, weight, bias = torch.randn(4, 7, 3).requires_grad_(), torch.ones(7), torch.zeros(7)
        return runtime.batch_norm(x, weight, bias, torch.zeros(7), torch.ones(7), 0.1, 1e-5, group)[0]

    by_op = signatures(nn.BatchNorm1d(7), torch.zeros(8, 7, 3, requires_grad=True))
    (signature,) = (candidate for target, candidate in by_op.items() if "batch_norm" in target)
    sends = algorithm_collectives(signature, choice_of(signature, "batch"), MESH, TrainingSetup())
    forward, backward = run_ranks(RANKS, sent, run)[0]
    assert sends_of(sends, "forward") == [(kind, RANKS * 4 * elements) for kind, elements in forward]
    assert sends_of(sends, "backward") == [(kind, 4 * elements) for kind, elements in backward]
    assert len(forward) == len(backward) == 1


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 5, 5))

    def forward(self, hidden, index, weights):
        return (torch.einsum("td,tkde->tke", hidden, self.up[index]) * weights[..., None]).sum(1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(5, 4), mark_experts(Experts())

    def forward(self, hidden):
        weights, index = self.gate(hidden).softmax(-1).topk(2)
        return self.experts(hidden, index, weights).sum()


def test_experts_send_tokens_there_and_back():
    def run(rank, group):
        cut = make_shard(MESH.axes[0], (Block(1, 4, 1),), 1)
        hidden, weights = torch.randn(6, 5).requires_grad_(), torch.rand(6, 2).requires_grad_()
        index = torch.tensor([[0, 2]] * 6)  # one on each rank
        weight = nn.Parameter(torch.randn(2, 5, 5))

        def layer(rows, numbers, shares):
            return (torch.einsum("td,tkde->tke", rows, weight[numbers]) * shares[..., None]).sum(1)

        return experts(layer, hidden, index, weights, group, cut)

    (signature,) = (
        candidate for target, candidate in signatures(Layer(), torch.zeros(12, 5, requires_grad=True)).items()
        if target == "call.opaque"
    )  # fmt: skip
    sends = algorithm_collectives(signature, choice_of(signature, "experts"), MESH, TrainingSetup())
    forward, backward = run_ranks(RANKS, sent, run)[0]
    items = [8, 4, 4, 8, 4]  # counts, rows, weights, numbers of experts, results
    pairs = zip(items, forward, strict=True)
    assert sends_of(sends, "forward") == [(kind, item * elements) for item, (kind, elements) in pairs]
    assert sorted(sends_of(sends, "backward")) == sorted((kind, 4 * elements) for kind, elements in backward)


def test_a_lookup_in_split_rows_and_ops_without_algorithms_send_nothing():
    by_op = signatures(nn.Embedding(8, 4), torch.zeros(6, dtype=torch.long))
    table = by_op["aten.embedding.default"]
    assert algorithm_collectives(table, choice_of(table, "rows"), MESH, TrainingSetup()) == ()

    plain = signatures(nn.Linear(8, 4, bias=False), torch.zeros(6, 8))["aten.linear.default"]
    for role in plain.roles:
        assert algorithm_collectives(plain, {"x": role.name}, MESH, TrainingSetup()) == ()
