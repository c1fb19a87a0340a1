"""`register_op`: an own function stays one op, and a rule says how it may be split.

The rule is put to the test when it is registered. Without a rule the op is probed when a model that
calls it is planned, as any op that nobody wrote a rule for.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from . import runtime
from .capture.building.schema import target_name
from .capture.user_calls.callee import Callee, flat, keep_as_one_op, replace_tensors, uncompiled
from .capture.user_calls.function_paths import is_path, replace_at
from .capture.user_calls.kept import CALLEES
from .errors import RuleError
from .ir import Op
from .ops import OpSpec, define_custom
from .probe.check import NothingProven, SplitTrial
from .probe.custom_ops import (
    CustomOp,
    OpParameter,
    RuleLike,
    Values,
    call_of,
    check_rule,
    custom_inputs,
    custom_rule,
    of_arguments,
)
from .probe.samples import PROVIDED, NotProbed
from .rules import parse
from .runtime.algorithms.custom_ops import provide, provide_algorithm, provided
from .runtime.world import Groups, start
from .verify.execute import custom_call
from .verify.ranks import run_threads

Registered = TypeVar("Registered")


def register_op(
    rule: RuleLike | None = None,
    function: Any = None,
    *,
    probe: Callable[[], Any] | None = None,
    algorithms: Mapping[str, Callable[..., Any]] | None = None,
    check: bool = True,
    shapes: Callable[..., Any] | None = None,
    flops: Callable[..., float] | None = None,
    bytes: Callable[..., float] | None = None,
    saved: str | None = None,
) -> Any:
    """How a custom op may be sharded: `@sw.register_op("b m k+, n k+ -> b m n")`, or `f = sw.register_op("...", f)`.

    rule        in the notation, one term for each tensor among the parameters; or a function of the op's
                arguments (those that it names) that returns one. A label with the name of a parameter has its
                size from there, and a rank gets its own size. Without a rule the op is probed.
    function    a plain or compiled function, a torch.autograd.Function, or a torch.library op. It stays one op. One of
                somebody else's is named by its path, "package.module:function", and replaced where it stands.
    probe       makes arguments to test the rule with: a tuple, (args, kwargs), or a list of these. Without it
                they are made from the rule.
    algorithms  for a label marked `label=name` (`label=name+` if it leaves a partial sum) the function that
                splits it: it takes the op's arguments, local, and `part`, which has the group and the sizes.
    check       False leaves out the test of the rule.
    shapes      for a function that can't run without values (numpy, Triton, a CUDA extension): takes its arguments and
                returns the shape of what it makes, a tuple of shapes, or empty tensors where the dtype is another.
    flops       for the planner: a function of the op's arguments (those that it names) that returns the FLOPs of a
                forward pass. Without it an op that sums something is priced as a matmul over its labels.
    bytes       the same for the bytes that it reads and writes (backward twice as many); default: its tensors, once.
    saved       for the planner: what its backward reads, as "0 1 r": numbers of tensors, and "r" for the result.
                Without it all its floating-point tensors and its first result count as saved.

    Returns the function to call, to be used as a decorator. A rule that is wrong is a RuleError that names
    the split which broke it.
    """
    if isinstance(rule, str) and function is None and is_path(rule):
        rule, function = None, rule
    if isinstance(function, str):
        return replace_at(function, lambda op: register_op(
                    rule, op, probe=probe, algorithms=algorithms, check=check, shapes=shapes, flops=flops, bytes=bytes,
                    saved=saved,
        ))  # fmt: skip

    def decorate(op: Any) -> Any:
        kind = _kind(op, shapes)
        checked = dict(algorithms or {})
        if isinstance(rule, str):
            _check_algorithms(kind.own.name, rule, checked)
        for label, algorithm in checked.items():
            provide_algorithm(kind.own.target, label, algorithm)
        if probe is not None:
            PROVIDED[kind.own.target] = lambda seed: _drawn(kind, probe, seed)
        if rule is not None and check:
            _check(kind, rule, probe)
        define_custom(kind.own.target, _spec(kind.own, rule, flops, bytes, saved))
        kind.keep()
        return kind.result

    return decorate if function is None else decorate(function)


def _spec(
    own: CustomOp,
    rule: RuleLike | None,
    flops: Callable[..., float] | None,
    moved: Callable[..., float] | None,
    saved: str | None,
) -> OpSpec:
    """The definition of a custom op, as those in `ops/`."""
    if saved is not None and not re.fullmatch(r"(\d\*?|r)?( (\d\*?|r))*", saved):
        raise RuleError(f'saved={saved!r} of {own.name} can\'t be read: write numbers of tensors and r, as "0 1 r"')
    return OpSpec(
        rule=None if rule is None else lambda call: custom_rule(own, rule, call),
        flops=None if flops is None else lambda call: float(of_arguments(own, flops, call)),
        bytes=None if moved is None else lambda call: float(of_arguments(own, moved, call)),
        saved=saved,
    )


@dataclass(frozen=True)
class _Registration:
    """A custom op, what the user calls afterwards, and how captures and generated code come to know it."""

    own: CustomOp
    result: Any
    bind: Callable[[Sequence[Any], dict[str, Any]], list[Any]]
    callee: Callee | None = None

    def keep(self) -> None:
        if self.callee is not None:
            provide(self.callee.path, self.callee.run)
            if isinstance(self.result, type):
                CALLEES[self.result] = self.callee


def _kind(op: Any, shapes: Callable[..., Any] | None = None) -> _Registration:
    overload = getattr(op, "_opoverload", op)  # torch.library.custom_op
    if isinstance(overload, torch._ops.OpOverloadPacket):
        overload = overload.default
    if isinstance(overload, torch._ops.OpOverload):
        return _library(op, overload)
    if isinstance(op, type) and issubclass(op, torch.autograd.Function):
        forward = inspect.signature(op.forward)
        if op.setup_context is torch.autograd.Function.setup_context:
            forward = forward.replace(parameters=list(forward.parameters.values())[1:])  # without ctx
        return _callable(op, Callee(op.apply, f"{op.__module__}.{op.__qualname__}", forward, shapes))
    if not callable(op) or not hasattr(uncompiled(op), "__qualname__"):
        raise RuleError(
            f"{op!r} can't be registered: register_op takes a function, a torch.autograd.Function or a torch.library op"
        )
    plain = uncompiled(op)
    callee = Callee(op, _path(f"{plain.__module__}.{plain.__qualname__}"), describe=shapes)
    return _callable(keep_as_one_op(callee), callee)


def _path(path: str) -> str:
    """Functions made inside of others share a name: they are numbered."""
    number, free = 1, path
    while "<locals>" in path and provided(free):
        number += 1
        free = f"{path}_{number}"
    return free


def _callable(result: Any, callee: Callee) -> _Registration:
    parameters = tuple(
        OpParameter(name=p.name, kind=_kind_of(p), default=p.default) for p in callee.signature.parameters.values()
    )
    name = callee.path.rsplit(".", 1)[-1]
    own = CustomOp(name=name, target=f"call.{callee.path}", parameters=parameters, run=callee.run_plain)
    return _Registration(own, result, callee.values, callee)


def _kind_of(parameter: inspect.Parameter) -> str:
    annotation = parameter.annotation
    if annotation is inspect.Parameter.empty:
        return ""
    name = annotation.__name__ if type(annotation) is type else str(annotation)
    return f"tuple[{name}, ...]" if parameter.kind is parameter.VAR_POSITIONAL else name


def _library(result: Any, op: torch._ops.OpOverload[..., Any]) -> _Registration:
    if op._schema.is_mutable:
        raise RuleError(f"{op} changes its arguments; register a function around it, which may do so")
    arguments = op._schema.arguments
    parameters = tuple(
        OpParameter(
            name=a.name, kind=str(a.type),
            default=a.default_value if a.has_default_value() else inspect.Parameter.empty,
        )
        for a in arguments
    )  # fmt: skip
    names = [a.name for a in arguments]

    def run(*values: Any) -> Any:
        return op(**dict(zip(names, values, strict=True)))

    def bind(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        known = {p.name: p.default for p in parameters} | dict(zip(names, args, strict=False)) | kwargs
        return [known[name] for name in names]

    return _Registration(CustomOp(name=str(op), target=target_name(op), parameters=parameters, run=run), result, bind)


def _check_algorithms(name: str, rule: str, algorithms: Mapping[str, Any]) -> None:
    named = set(parse(rule).algorithms)
    for label in sorted(named ^ set(algorithms)):
        if label in named:
            remedy = f"pass algorithms={{{label!r}: ...}}"
            raise RuleError(f"the rule {rule!r} of {name} splits {label} by an algorithm; {remedy}")
        raise RuleError(f"{name} has an algorithm for {label}, and its rule {rule!r} does not say {label}=name")


def _check(kind: _Registration, rule: RuleLike, probe: Callable[[], Any] | None) -> None:
    """Put the rule to the test on the user's inputs, or on such as the rule describes."""
    own = kind.own
    if probe is None and not isinstance(rule, str):
        raise RuleError(f"the rule of {own.name} is a function, which says no shapes: pass probe=, or check=False")
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        try:
            samples = _probes(kind, probe) if probe is not None else list(custom_inputs(own, parse(str(rule))))
            for values in samples:
                _see_changes(kind, values)
        except NotProbed as why:
            warnings.warn(f"the rule of {own.name} is not checked: {why}; pass probe=", stacklevel=4)
            return
        for values in samples:
            try:
                check_rule(own, rule, values, _check_communicating)
            except NothingProven as why:
                if probe is not None:
                    raise RuleError(f"probe= of {own.name} needs other inputs: {why}") from why
                warnings.warn(f"the rule of {own.name} is not checked: {why}; pass probe=", stacklevel=4)


def _see_changes(kind: _Registration, values: Values) -> None:
    """Run it once, to see that it runs and which tensors it changes."""
    tensors = flat(list(values.values()))
    copies = [x.clone() for x in tensors]
    known = kind.callee.changed if kind.callee is not None else ()
    try:
        if kind.callee is not None:
            kind.callee.changed = ()
        with torch.no_grad():
            kind.own.run(*replace_tensors(list(values.values()), copies))
    except Exception as error:
        raise NotProbed(f"it does not run here: {str(error).splitlines()[0]}") from error
    if kind.callee is not None:
        now = (at for at, (x, y) in enumerate(zip(tensors, copies, strict=True)) if not torch.equal(x, y))
        kind.callee.changed = tuple(sorted({*known, *now}))


def _probes(kind: _Registration, probe: Callable[[], Any]) -> list[Values]:
    """The user's inputs, with a value for every parameter."""
    probed = probe()
    names = [p.name for p in kind.own.parameters]
    samples = []
    for sample in probed if isinstance(probed, list | Iterator) else [probed]:
        args: Sequence[Any] = sample if isinstance(sample, tuple) else (sample,)
        kwargs: dict[str, Any] = {}
        if len(args) == 2 and isinstance(args[0], tuple | list) and isinstance(args[1], dict):
            args, kwargs = args
        samples.append(dict(zip(names, kind.bind(args, kwargs), strict=True)))
    return samples


def _drawn(kind: _Registration, probe: Callable[[], Any], seed: int) -> Any:
    torch.manual_seed(seed)
    return call_of(kind.own, _probes(kind, probe)[0])


def _check_communicating(trial: SplitTrial) -> None:
    """Judge an algorithm: its ranks are threads that communicate with each other."""
    if dist.is_initialized():
        message = (
            f"{trial.op}: its algorithms are not checked here, where processes communicate already; register it before"
        )
        warnings.warn(message, stacklevel=2)
        return

    def work(rank: int) -> Any:
        start()
        groups = Groups(trial.mesh)

        def run(op: Op, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            group = groups[op.argument("axes")]
            call = runtime.custom_algorithm(op.argument("path"), op.argument("label"), group, op.argument("size"))
            return flat(custom_call(call, op, tensors))

        return trial.rank(rank, run)

    trial.judge(run_threads(trial.mesh.size, work))
