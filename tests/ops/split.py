"""A sample on 2 and on 3 ranks, wherever a rule allows a split, against eager.

Every role of every op of the captured graph is checked on shards first (`probe.check_role`). Then a plan that
splits each op on one of its roles, another one for each sample, goes through lowering and emission, and
the generated file runs on ranks that are threads: forward, backward, gradients brought to whole.
"""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwright.capture import CapturedGraph, capture
from shardwright.capture.interpret import run
from shardwright.cluster import Cluster
from shardwright.compile import CompilerSettings, copy_to_meta
from shardwright.errors import RankError, ShardwrightError
from shardwright.ir import Graph, Op
from shardwright.layout import Axis, Mesh
from shardwright.plan import Plan
from shardwright.plan.builder import PlanBuilder
from shardwright.plan.request import PlanRequest
from shardwright.probe import check_role, probing
from shardwright.probe.check import NothingProven, WrongSplit
from shardwright.rules import Analysis, analyse
from shardwright.runtime.model.access import state_of
from shardwright.runtime.model.parallel_model import ParallelModel
from shardwright.runtime.world import start
from shardwright.verify.compiled import SharingCompiler
from tests.ops.cases import Sample
from tests.ops.expectations import undefined
from tests.ops.judge import EagerFails, Run, Verdict, described, difference, mixed, run_eager
from tests.parity.threaded import whole_gradients
from tests.runtime.ranks import run_ranks

WAYS = (2, 3)


def judge_splits(sample: Sample) -> list[tuple[int, Verdict]]:
    """(ranks, verdict) for each number of ranks that some op of the sample can be split over."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            wanted = run_eager(sample)
        except EagerFails:
            return []
        try:
            real = (sample.module, sample.args, sample.kwargs)
            captured = capture(copy_to_meta(sample.module), sample.args, sample.kwargs, real=lambda: real)
            analysis = analyse(captured.graph, probing(captured.functions))
            ways = [parts for parts in WAYS if _split_ops(analysis, parts)]
            wrong = {} if undefined(sample.subject) else _wrong_roles(sample, captured, analysis, ways)
        except Exception as error:  # it was captured before: whatever it is now is a fault
            return [(2, Verdict("foreign", described(error)))]
        return [(parts, wrong.get(parts) or _judge(sample, captured, wanted, parts)) for parts in ways]


def _split_ops(analysis: Analysis, parts: int) -> list[Op]:
    return [op for op in analysis.live if any(role.fills(parts) for role in analysis.signatures[op.name].roles)]


def _wrong_roles(sample: Sample, captured: CapturedGraph, analysis: Analysis, ways: list[int]) -> dict[int, Verdict]:
    """The first role that does not recombine, for each number of shards."""
    seen: dict[str, tuple[Tensor, ...]] = {}
    module = copy.deepcopy(sample.module)
    with torch.no_grad():
        inputs = captured.flatten(sample.args, sample.kwargs)
        state = (dict(module.named_parameters(remove_duplicate=False)), dict(module.named_buffers()))
        run(captured, [x.detach().clone() for x in inputs], *state, callback=lambda op, x, _: seen.update({op.name: x}))
    by_name: dict[int, Verdict] = {}
    for parts in ways:
        for op in _split_ops(analysis, parts):
            for role in analysis.signatures[op.name].roles:
                if role.fills(parts) and not op.target.startswith("call.") and parts not in by_name:
                    try:
                        check_role(analysis, op, role.name, parts, seen[op.name])
                    except NothingProven:
                        continue
                    except WrongSplit as error:
                        by_name[parts] = Verdict("wrong", str(error))
    return by_name


def plan_of(pick: int) -> Callable[[Graph, Cluster], Plan]:
    """A plan that splits every op on the `pick`-th of the roles that it has."""

    def plan(graph: Graph, cluster: Cluster) -> Plan:
        size = cluster.size
        axis = Axis(name="tp", size=size)
        builder = PlanBuilder(graph, Mesh(axes=(axis,)), analyse(graph, probing()))
        for op in builder.ops:
            roles = [role for role in builder.roles(op) if role.fills(size)]
            if roles:
                builder.split(op, axis, roles[pick % len(roles)])
        return builder.finish(f"tp={size}")

    return plan


def _judge(sample: Sample, captured: CapturedGraph, wanted: Run, parts: int) -> Verdict:
    with tempfile.TemporaryDirectory(prefix="shardwright-split-") as folder:
        captures = {(sample.module.training, 0): captured}

        def rank(_: int) -> Run:
            return _run(sample, captures, parts, Path(folder))

        try:
            results = run_ranks(parts, rank)
        except ShardwrightError as error:
            return Verdict("refused", f"{type(error).__name__}: {error}")
        except RankError as error:
            return Verdict("foreign", str(error))
        except Exception as error:  # whatever it is, a user would see it
            return Verdict("foreign", described(error))
    drawn = any(op.draws for op in captured.graph.ops) or undefined(sample.subject)
    for number, value in enumerate(results):
        if off := difference(value, wanted, values=not drawn):
            return Verdict("wrong", f"rank {number}: {off}")
    return Verdict("drawn" if drawn else "right")


def _run(sample: Sample, captures: dict[tuple[bool, int], CapturedGraph], parts: int, folder: Path) -> Run:
    request = PlanRequest.read(plan_of(sample.number))
    settings = CompilerSettings(request=request, directory=folder, exact_random=True)
    compiler = SharingCompiler(copy.deepcopy(sample.module), None, start(), settings)
    compiler.captures = captures
    model = ParallelModel(compiler)
    leaves, spec = pytree.tree_flatten((sample.args, sample.kwargs))
    fresh = [leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
             for leaf in leaves]  # fmt: skip
    args, kwargs = pytree.tree_unflatten(fresh, spec)
    result = model(*args, **kwargs)
    values = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor) and x.requires_grad]
    if values:
        torch.stack([mixed(x) for x in values]).sum().backward()
    gradients = [leaf.grad for leaf in fresh if isinstance(leaf, Tensor) and leaf.requires_grad]
    return Run(
        result=pytree.tree_map_only(Tensor, Tensor.detach, result),
        gradients=[*gradients, *_parameter_gradients(sample.module, model)],
        buffers=[state_of(model).buffers[key].clone() for key, _ in sample.module.named_buffers()],
    )


def _parameter_gradients(module: nn.Module, model: ParallelModel) -> list[Tensor | None]:
    whole = whole_gradients(model)
    return [whole[key] for key, parameter in module.named_parameters() if parameter.requires_grad]
