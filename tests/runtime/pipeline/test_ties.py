"""Parameters that two stages hold, and norms over all stages, against one device."""

import math

import pytest
import torch

from tests.runtime.ranks import run_processes

from . import chain
from .test_autograd import assert_near, gradients, merged, ready

CASES = {
    2: [("1f1b", "2", "inside"), ("interleaved", "2", "outside"), ("zbv", "2", "inside")],
    4: [("1f1b", "1+3", "inside"), ("zb", "2x2", "outside"), ("1f1b", "1+2+1", "inside")],
}


def trained(rank, cases):
    """Three steps of an optimizer with clipping, an accumulation under no_sync, a step whose gradients are kept."""
    collected = []
    for kind, pp_ranks, backward in cases:
        built = ready(rank, kind, pp_ranks, 4, backward=backward, tied=True)
        optimizer = torch.optim.AdamW(built.parameters.values(), lr=0.05)
        totals = []
        for step in range(3):
            optimizer.zero_grad()
            with built.sync.no_sync():
                built.running(chain.batch(step))[0].backward()
            built.running(chain.batch(step + 10))[0].backward()
            totals.append(torch.nn.utils.clip_grad_norm_(built.parameters.values(), 0.5))
            optimizer.step()
        built.running(chain.batch(20))[0].backward()  # onto clipped gradients
        values = {key: p.detach().as_subclass(torch.Tensor) for key, p in built.parameters.items()}
        collected.append((gradients(built.parameters), values, totals))
    return collected


@pytest.mark.parametrize("ranks", CASES)
def test_a_tied_parameter_trains_as_one(ranks):
    model = chain.Single(tied=True)
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.05)
    totals = []
    for step in range(3):
        optimizer.zero_grad()
        model(*chain.batch(step))[0].backward()
        model(*chain.batch(step + 10))[0].backward()
        totals.append(torch.nn.utils.clip_grad_norm_(parameters.values(), 0.5))
        optimizer.step()
    model(*chain.batch(20))[0].backward()
    for case in zip(*run_processes(ranks, trained, CASES[ranks]), strict=True):
        assert_near(merged([tensor for tensor, _, _ in case]), gradients(parameters))
        assert_near(merged([tensor for _, tensor, _ in case]), {key: p.detach() for key, p in parameters.items()})
        for _, _, mine in case:
            torch.testing.assert_close(mine, totals, rtol=1e-12, atol=0)
            assert mine == case[0][2]  # to the last bit


ORDERS = (2.0, 1.0, math.inf)


def norms(rank, pp_ranks):
    built = ready(rank, "1f1b", pp_ranks, 2, tied=True)
    built.running(chain.batch())[0].backward()
    parameters = [p for p in built.parameters.values() if p.grad is not None]
    grads = [p.grad for p in parameters]
    results = [
        torch.nn.utils.get_total_norm(grads, order, foreach=foreach) for order in ORDERS for foreach in (None, False)
    ]
    results.append(torch.stack([p.grad.norm() for p in parameters]).square().sum().sqrt())
    results.append(torch.nn.utils.get_total_norm(parameters))
    if "w2" in built.parameters:
        built.parameters["w2"].grad[0, 0] = math.nan
    results.append(torch.nn.utils.get_total_norm([p.grad for p in parameters], math.inf))
    return results


@pytest.mark.parametrize("pp_ranks", ["2", "1+2"])
def test_norms_are_those_of_the_whole_model(pp_ranks):
    model = chain.Single(tied=True)
    model(*chain.batch())[0].backward()
    used = [p for p in model.parameters() if p.grad is not None]
    grads = [p.grad for p in used]
    wanted = [torch.nn.utils.get_total_norm(grads, order) for order in ORDERS for _ in range(2)]
    wanted += [wanted[0], torch.nn.utils.get_total_norm(used), torch.tensor(math.nan).double()]
    for result in run_processes(2 if pp_ranks == "2" else 3, norms, pp_ranks):
        torch.testing.assert_close(result, wanted, rtol=1e-12, atol=0, equal_nan=True)
