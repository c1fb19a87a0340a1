"""Test every split that a plan chooses on small inputs, once for each kind of op.

A written rule, and the local form that lowering gives an op (a mean becomes a sum and a division), are
trusted by everything after them. Here the op runs globally and on shards, forward and backward, with
its arguments in this model. Results are cached for the process, like those of probing.

Not tested: ops whose shards communicate (they have their own tests), calls that don't run with
random inputs or give nothing finite, opaque submodules (checked when captured), and ops that return
uninitialized memory.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable
from typing import Any

import torch

from ..errors import LoweringError, raise_all
from ..ir import Op
from ..ops.user_calls import OPAQUE
from ..rules import FAN, ROWS, STRIPED, Analysis, Choices, OpCall, Rule, Signature, analyse, find_rule
from .check import NothingProven, WrongSplit, check_role, parts_of
from .discover import UNCHECKED, careful, one_op, run_known
from .samples import NotProbed, Sample, smallest_sample

_ONE_AT_A_TIME = threading.Lock()  # ranks may be threads
UNDEFINED = ("aten.empty", "aten.new_empty")
"""Ops that return uninitialized memory."""
_TRIED: dict[Any, str] = {}  # the fault of a split; empty if it is right


def check_splits(analysis: Analysis, choices: Iterable[Choices]) -> None:
    """Raise if a split of a plan does not compute what the global op computes."""
    faults: dict[str, Op] = {}
    ops = {op.name: op for op in analysis.graph.ops}
    with _ONE_AT_A_TIME:
        for chosen in choices:
            for name, picked in chosen.items():
                signature = analysis.signatures.get(name)
                if signature is None or signature.rule is None or name not in ops:
                    continue
                for choice in {_tried(signature, how) for how in picked.values()} - {FAN, ""}:
                    fault = _fault(analysis, ops[name], signature.rule, choice)
                    if fault:
                        faults.setdefault(fault, ops[name])
    raise_all(
        LoweringError,
        "a split of this plan does not compute what the global op computes; this is a bug in shardwright: please "
        "report it, and exclude the split with a constraint meanwhile:",
        [f"{op}: {fault}" for fault, op in faults.items()],
    )


def _tried(signature: Signature, choice: str) -> str:
    """What of a choice is tried out: the label of a role, in stripes or not, or the choice itself."""
    role = signature.picked(choice)
    return choice if role is None else f"{STRIPED}{role.label}" if role.striped else role.label


def _fault(analysis: Analysis, op: Op, rule: Rule, choice: str) -> str:
    values = [analysis.graph.values[name] for name in (*op.inputs, *op.outputs)]
    shapes = tuple((value.shape, value.dtype, value.gradient) for value in values)
    arguments = tuple((name, repr(value) if isinstance(value, dict) else value) for name, value in op.arguments)
    key = (op.target, arguments, op.autocast, op.no_grad, shapes, choice)
    if key not in _TRIED:
        inputs = len(op.inputs)
        _TRIED[key] = _try(OpCall(op, tuple(values[:inputs]), tuple(values[inputs:])), rule, choice)
    return _TRIED[key]


def _try(call: OpCall, rule: Rule, choice: str) -> str:
    if any(word in call.op.target for word in (*UNCHECKED, *UNDEFINED, OPAQUE)) or not call.inputs:
        return ""

    def same_rule(sample: Sample) -> bool:
        small = find_rule(sample.call)
        return small is not None and small.text == rule.text

    with torch.random.fork_rng(devices=[]), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        try:
            return _judge(smallest_sample(call, run_known, same_rule), choice)
        except NotProbed:
            return ""


def _divisors(size: int) -> list[int]:
    return [parts for parts in range(2, size + 1) if size % parts == 0]


def _judge(sample: Sample, choice: str) -> str:
    label, striped = choice.removeprefix(STRIPED), choice.startswith(STRIPED)

    def find(call: OpCall) -> tuple[Rule | None, str]:
        rule = find_rule(call)
        return rule and rule.with_triangular([label] if striped else rule.triangular), ""

    analysis = analyse(one_op(sample.call), find)
    (op,) = analysis.graph.ops
    role = next((role for role in analysis.signatures[op.name].roles if role.label == label), None)
    if role is None and ROWS not in choice:
        return ""
    name = choice if role is None else f"{STRIPED}{role.name}" if striped else role.name
    for parts in _divisors(role.size)[:1] if role and striped else parts_of(3 if role is None else role.size)[:1]:
        try:
            check_role(analysis, op, name, parts, sample.draw(3), careful(run_known))
        except WrongSplit as error:
            return error.details
        except NothingProven:
            return ""
    return ""
