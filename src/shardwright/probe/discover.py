"""Discover the rule of an op that has none: probe it, check forward and backward, write it in the notation.

samples.py   the call at small sizes, with random inputs
search.py    the splits that recombine there
wording.py   the splits as labels of a rule
here         each label checked on 2 and 3 shards, forward and backward, on other inputs
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..capture import ImportedFunction
from ..capture.interpret import run_op
from ..errors import RuleError
from ..ir import Graph, Input, Op, Output
from ..ops.user_calls import COND, OPAQUE, SCAN, WHILE
from ..rules import PASS_PARTIAL, Find, OpCall, Rule, analyse, find_rule
from .check import Run, check_role, parts_of
from .samples import NotProbed, Sample, is_finite_somewhere, make_sample
from .search import ProbeResult, search
from .wording import Wording

_ONE_AT_A_TIME = threading.Lock()  # ranks may be threads
_KNOWN: dict[Any, tuple[Rule | None, str]] = {}
UNCHECKED = ("aten.lstm", "aten.gru", "aten.rnn", "aten.mkldnn", "aten._thnn", "batch_norm", "aten.segment_reduce")
"""Ops that read past the end of a shard, or by lengths that are drawn, instead of rejecting them."""
_FUNCTIONS: dict[str, ImportedFunction] = {}  # the user's functions in the graphs of this process, by target


def probing(functions: Mapping[str, ImportedFunction] | None = None) -> Find:
    """A rule finder: the written rule, else one found by probing the op; if neither, the reason.

    `functions` are those of the captured model; without them those of the last capture are used.
    """
    for target, function in (functions or {}).items():  # avoid recompiling for every shape that is tried
        _FUNCTIONS[target] = replace(function, call=function.plain) if function.plain is not None else function

    def find(call: OpCall) -> tuple[Rule | None, str]:
        rule = find_rule(call)
        if rule is not None:
            return rule, ""
        if call.op.target == OPAQUE:  # it runs arbitrary code, which may not work on shards
            return None, "it is opaque; use sw.opaque(module, batch=True) if its samples are independent"
        if call.op.target in (COND, SCAN, WHILE):  # a probe sees one branch, and data may take another
            return None, "its control flow depends on data"
        if any(word in call.op.target for word in UNCHECKED):
            return None, "its kernel does not check the sizes of its inputs"
        result = _FUNCTIONS.get(call.op.target)
        return discover(call, run_known, result.call if result is not None else None)

    return find


def run_known(op: Op, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Run an op of a captured graph."""
    return run_op(op, inputs, _FUNCTIONS)


def discover(call: OpCall, run: Run, version: Hashable = None) -> tuple[Rule | None, str]:
    """The rule of a call by probing, or None and why not. Cached by shapes and arguments."""
    key = (
        call.op.target, repr(call.op.arguments), call.op.autocast, call.op.no_grad, version,
        tuple((value.shape, value.dtype, value.gradient) for value in (*call.inputs, *call.outputs)),
    )  # fmt: skip
    with _ONE_AT_A_TIME:
        if key not in _KNOWN:
            _KNOWN[key] = _probed(call, run)
        return _KNOWN[key]


def careful(run: Run) -> Run:
    """Turn any error of the op into NotProbed: it may reject random inputs."""

    def call(op: Op, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        try:
            return run(op, inputs)
        except Exception as error:
            raise NotProbed(f"it can't be called with random inputs: {(str(error).splitlines() or [''])[0]}") from error

    return call


def _probed(call: OpCall, run: Run) -> tuple[Rule | None, str]:
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ops may warn about useless shards
        torch.manual_seed(0)
        try:
            return _discover(call, careful(run)), ""
        except NotProbed as why:
            return None, f"it could not be probed: {why}"


def _discover(call: OpCall, run: Run) -> Rule:
    sample = make_sample(call, run)
    result = _checked(search(sample, run), sample, run)
    return Wording(result, call, sample).rule()


def _checked(result: ProbeResult, sample: Sample, run: Run) -> ProbeResult:
    """The splits that also hold backward, and on other inputs."""
    sizes = {size for value in (*sample.call.inputs, *sample.call.outputs) for size in value.shape}
    wording = Wording(result, sample.call, replace(sample, real={size: size for size in sizes}))
    rule = wording.rule()
    analysis = analyse(one_op(sample.call), lambda call: (rule, ""))
    (op,) = analysis.graph.ops
    roles = {role.label for role in analysis.signatures[op.name].roles}
    draws = [sample.draw(3), sample.draw(4)]
    _check_dependence(sample, run, draws)
    _check_backward(sample, run)

    def holds(choice: str, units: int) -> bool:
        try:
            for parts, inputs in zip(parts_of(units), draws, strict=False):
                check_role(analysis, op, choice, parts, inputs, run)
        except RuleError:
            return False
        return True

    return ProbeResult(
        tuple(split for split, label in wording.names.items() if label in roles and holds(label, split.units)),
        tuple(group for number, group in enumerate(result.linear, 1) if holds(f"{PASS_PARTIAL}{number}", 3)),
    )


def _check_dependence(sample: Sample, run: Run, draws: Sequence[Sequence[Tensor]]) -> None:
    """Every result must depend on the inputs: a loss that is clamped to zero recombines under any split."""
    first, second = (run(sample.call.op, draw) for draw in draws)
    for a, b in zip(first, second, strict=True):
        if a.is_floating_point() and a.shape == b.shape and torch.equal(a, b):
            raise NotProbed("its result is the same for different random inputs, so probing proves nothing")


def _check_backward(sample: Sample, run: Run) -> None:
    """The op must have the backward that the graph claims."""
    try:
        finite = is_finite_somewhere(sample, run, 5)
    except Exception as error:  # any error means that it can't be trained
        raise NotProbed(f"its backward does not run: {str(error).splitlines()[0]}") from error
    if not finite:
        raise NotProbed("its result or a gradient has no finite element with random inputs, so probing proves nothing")


def one_op(call: OpCall) -> Graph:
    """A graph of one op."""
    values = {value.name: value for value in (*call.inputs, *call.outputs)}
    return Graph(
        name="probe", entry="train", values=values, parameters=(), buffers=(), ops=(call.op,),
        inputs=tuple(Input(value=value.name, path=value.name) for value in call.inputs),
        outputs=tuple(Output(path=value.name, value=value.name) for value in call.outputs),
    )  # fmt: skip
