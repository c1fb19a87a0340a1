"""The unmodified loop over pipelines, on gloo processes, against the same model on one device."""

import pytest
import torch

from shardwright.schedule import forward_only, kind_named, spread, with_prologue
from tests.runtime.ranks import run_processes

from . import chain

SEATS = {  # for each number of seats, devices of each
    "2": ((0,), (1,)),
    "4": ((0,), (1,), (2,), (3,)),
    "2x2": ((0, 1), (2, 3)),
    "1+3": ((0,), (1, 2, 3)),
    "3+1": ((0, 1, 2), (3,)),
    "1+2+1": ((0,), (1, 2), (3,)),
}
PARTS = {1: (4,), 2: (2, 2), 3: (1, 2, 1), 4: (1, 1, 1, 1)}


def schedules(kind, seats, microbatches):
    """The training schedule, the one for inference, and how many parts each segment has."""
    made = spread(kind_named(kind).make(len(seats), microbatches), seats)
    last = made.segments - 1
    return (
        with_prologue(made, [last]),
        with_prologue(forward_only(made.holders, microbatches), [last]),
        PARTS[made.segments],
    )


def ready(rank, kind, seats, microbatches, **options):
    training, inference, parts = schedules(kind, SEATS[seats], microbatches)
    return chain.build(rank, training, inference, parts, **options)


def gradients(built):
    return {key: None if p.grad is None else p.grad.as_subclass(torch.Tensor) for key, p in built.parameters.items()}


def merged(results):
    """What the ranks hold together; copies must be equal."""
    found = {}
    for held in results:
        for key, value in held.items():
            if key in found and value is not None:
                torch.testing.assert_close(value, found[key], rtol=0, atol=0)
            found[key] = value
    return found


def assert_near(found, wanted):
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=1e-12, msg=lambda text, key=key: f"{key}: {text}")


def single(use):
    """The gradients of the original."""
    model = chain.Single()
    use(model)
    return {key: p.grad for key, p in model.named_parameters()}


def step(rank, kind, seats, microbatches, options):
    built = ready(rank, kind, seats, microbatches, **options)
    loss, logits, hits, decay = built.running(chain.batch())
    loss.backward()
    return gradients(built), (loss.detach(), logits.detach(), hits, decay.detach())


CASES = [
    ("gpipe", "2", 4), ("1f1b", "2", 4), ("1f1b", "2", 1), ("1f1b", "4", 6), ("interleaved", "2", 4),
    ("1f1b", "2x2", 3), ("gpipe", "1+3", 2), ("1f1b", "3+1", 4), ("1f1b", "1+2+1", 4), ("interleaved", "1+3", 2),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "seats", "microbatches"), CASES)
def test_a_step_is_that_of_the_original(kind, seats, microbatches):
    ranks = sum(map(len, SEATS[seats]))
    options = {"recomputed": kind == "1f1b"}
    results = run_processes(ranks, step, kind, seats, microbatches, options)
    outputs = chain.Single()(*chain.batch())
    assert_near(merged([held for held, _ in results]), single(lambda model: model(*chain.batch())[0].backward()))
    for _, found in results:
        for mine, wanted in zip(found, outputs, strict=True):
            torch.testing.assert_close(mine, wanted.detach(), rtol=0, atol=1e-12)
