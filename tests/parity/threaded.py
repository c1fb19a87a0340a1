"""A tiny module through `sw.parallelize` on ranks that are threads, and beside it the original.

    one = compare(Net, (x, y), "dp=2")

raises if loss, any gradient or any buffer differs by more than 1e-10 (the measure of the
design, section 11), and returns what both sides found, for what a test wants to know more.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor, nn

from shardwright.parallelize import parallelize
from shardwright.plan.request import read_source
from shardwright.runtime.collectives import comm, process_group
from shardwright.runtime.model.access import state_of
from shardwright.runtime.model.parallel_model import ParallelModel
from shardwright.runtime.parameters import buckets
from shardwright.runtime.parameters.full_tensors import gather_tensor
from shardwright.runtime.parameters.sharded import keeps_share
from shardwright.storage import stored_layout
from tests.options import grouped
from tests.runtime.ranks import run_ranks

TOLERANCE = 1e-10


@dataclass(kw_only=True)
class Rank:
    """What one rank found."""

    outputs: Any
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    forward: list[comm.Issued]
    backward: list[comm.Issued]
    synced: list[int]  # the elements of each bucket of parameter gradients
    text: str


@dataclass(kw_only=True)
class Compared:
    loss: Tensor
    gradients: dict[str, Tensor | None]
    ranks: list[Rank] = field(default_factory=list)

    def sent(self, kind: str, axis: str) -> tuple[int, int]:
        """How many collectives of a kind went over an axis, forward and backward, on the first rank."""
        first = self.ranks[0]
        forward, backward = (
            sum(k == kind and axis in a for k, a, _ in value) for value in (first.forward, first.backward)
        )
        return forward, backward


def world_of(plan: str) -> int:
    return read_source(plan).size


def whole_gradients(model: ParallelModel) -> dict[str, Tensor | None]:
    holding = state_of(model)
    by_name: dict[str, Tensor | None] = {}
    for spec in holding.specs:
        parameter = holding.parameters[spec.name]
        gradient, layout = parameter.grad, stored_layout(spec, holding.groups.mesh.sizes)
        if keeps_share(parameter):
            layout = parameter.shard.spread
        by_name[spec.name] = None if gradient is None else gather_tensor(gradient, spec, holding.groups, layout).clone()
    return by_name


def ranks_of(make: Callable[[int], nn.Module], args: tuple[Any, ...], plan: str, **options: Any) -> list[Rank]:
    """Compile and run one step on every rank; `make` gives each rank its module."""
    folder = Path(tempfile.mkdtemp(prefix="section4-"))
    noted = _Noted()

    def run(rank: int) -> Rank:
        model = parallelize(make(rank), plan=plan, example=args, **grouped(directory=folder, **options))
        with comm.recording() as forward:
            outputs = model(*args)
        with comm.recording() as backward:
            outputs.backward()
        return Rank(
            outputs=outputs.detach().clone(), gradients=whole_gradients(model), forward=forward, backward=backward,
            synced=noted.sent.get(rank, []),
            buffers={key: buffer.clone() for key, buffer in state_of(model).buffers.items()},
            text=model.generated.read_text() if model.generated else "",
        )  # fmt: skip

    with mock.patch.object(buckets, "process_group", noted):
        return run_ranks(world_of(plan), run)


class _Noted:
    """`nearby`, with a list of what the gradient sync sends."""

    def __init__(self) -> None:
        self.sent: dict[int, list[int]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(process_group, name)

    def all_reduce(self, tensor: Tensor, group: Any) -> Any:
        self.sent.setdefault(dist.get_rank(), []).append(tensor.numel())
        return process_group.all_reduce(tensor, group)

    def reduce_scatter(self, out: Tensor, tensor: Tensor, group: Any) -> Any:
        self.sent.setdefault(dist.get_rank(), []).append(tensor.numel())
        return process_group.reduce_scatter(out, tensor, group)


def compare(module: nn.Module, args: tuple[Any, ...], plan: str, **options: Any) -> Compared:
    """Run both and assert that they agree on every rank."""
    module = module.double()
    args = tuple(argument.double() if argument.is_floating_point() else argument for argument in args)
    original = copy.deepcopy(module)
    loss = original(*args)
    loss.backward()
    expected = Compared(loss=loss.detach(), gradients={key: p.grad for key, p in original.named_parameters()})
    expected.ranks = ranks_of(lambda rank: copy.deepcopy(module), args, plan, **options)
    scale = max((float(g.abs().max()) for g in expected.gradients.values() if g is not None), default=0.0)
    for rank in expected.ranks:
        assert_close(rank.outputs, expected.loss, scale, "the loss")
        for key, gradient in rank.gradients.items():
            wanted = expected.gradients[key]
            assert (gradient is None) == (wanted is None), key
            if gradient is not None and wanted is not None:
                assert_close(gradient, wanted, scale, key)
        for key, buffer in original.named_buffers():
            assert_close(rank.buffers[key], buffer, 0.0, key)
    return expected


def assert_close(mine: Tensor, theirs: Tensor, scale: float, what: str) -> None:
    differences = (mine.double() - theirs.double()).masked_fill(mine == theirs, 0.0)  # inf - inf is nan
    apart = float(differences.abs().max())
    largest = float(theirs.double().abs().masked_fill(~theirs.isfinite(), 0.0).max())
    assert apart <= TOLERANCE * (largest + scale), f"{what} is off by {apart:.3g}"


def apart(mine: Tensor, theirs: Tensor) -> bool:
    """Whether a wrong way shows: a test that can't tell it from the right one proves nothing."""
    return float((mine - theirs).detach().abs().max()) > 1e-4 * (1e-9 + float(theirs.detach().abs().max()))
