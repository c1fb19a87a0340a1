"""Custom ops: bind their rules to a call, draw inputs from a rule, and test the rule.

custom_rule     the rule of a call: without optional tensors that are missing, with sizes from arguments
custom_inputs   a small size for every label, random tensors of the resulting shapes
check_rule      every split that the rule allows, on 2 and 3 shards, forward and backward
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, product
from typing import Any

import torch
from torch import Tensor

from ..capture.interpret import filled
from ..capture.user_calls.callee import flat
from ..errors import RuleError
from ..ir import Dtype, Op, Slot, Value
from ..layout import Reduction
from ..rules import PASS_PARTIAL, Analysis, OpCall, Rule, analyse, parse
from ..rules.notation import Term
from .check import SplitTrial, WrongSplit, parts_of
from .discover import one_op
from .samples import NotProbed

NOTHING = inspect.Parameter.empty
"""The default of a parameter that has none."""

LABEL_SIZES = (6, 4, 8, 5, 9, 10, 7, 12, 11, 13, 15, 14, 16, 18, 20, 21)

RuleLike = str | Callable[..., str | None]
Values = dict[str, Any]
"""A value for every parameter of an op."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpParameter:
    """A parameter of a custom op. `kind` is its annotation, if it has one."""

    name: str
    kind: str = ""
    default: Any = NOTHING

    @property
    def tensor(self) -> bool | None:
        """Whether it is a tensor, or tensors; None if not annotated."""
        if self.kind:
            return "Tensor" in self.kind
        return None if self.default is NOTHING or self.default is None else False

    @property
    def several(self) -> bool:
        """Whether it is a list of tensors."""
        return any(word in self.kind.lower() for word in ("list", "tuple", "sequence"))

    @property
    def usual(self) -> Any:
        """A value to test with."""
        return self.default if self.default is not NOTHING else {"float": 0.5, "bool": False}.get(self.kind, NOTHING)


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomOp:
    """A custom op; `run` takes a value for every parameter, in order."""

    name: str
    target: str
    parameters: tuple[OpParameter, ...]
    run: Callable[..., Any]

    def __call__(self, op: Op, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        arguments = dict(op.arguments)
        values = [filled(arguments.get(p.name, p.default), inputs) for p in self.parameters]
        return flat(self.run(*values))


def custom_rule(own: CustomOp, rule: RuleLike, call: OpCall) -> Rule | None:
    """The rule for a call."""
    arguments = _arguments(own, call)
    text = rule if isinstance(rule, str) else of_arguments(own, rule, call)
    if text is None:
        return None
    parsed = parse(text)
    sizes = {
        p.name: arguments[p.name]
        for p in own.parameters
        if type(arguments[p.name]) is int and p.name in labels_of(parsed)
    }
    local = {name: (name,) for name in sizes}
    terms = _terms(own, parsed, arguments, len(call.inputs))
    return replace(parsed, inputs=terms, sizes={**parsed.sizes, **sizes}, local=local)


def _arguments(own: CustomOp, call: OpCall) -> dict[str, Any]:
    return {p.name: call.op.argument(p.name, None if p.default is NOTHING else p.default) for p in own.parameters}


def of_arguments(own: CustomOp, function: Callable[..., Any], call: OpCall) -> Any:
    """Call a user's function with the arguments that it names; tensors come as shape and dtype."""
    wanted = inspect.signature(function).parameters
    every = any(parameter.kind is parameter.VAR_KEYWORD for parameter in wanted.values())
    shown = {name: _shown(value, call) for name, value in _arguments(own, call).items()}
    return function(**{name: value for name, value in shown.items() if every or name in wanted})


def _shown(argument: Any, call: OpCall) -> Any:
    if isinstance(argument, Slot):
        return call.inputs[argument.index]
    return tuple(_shown(inner, call) for inner in argument) if isinstance(argument, tuple) else argument


def labels_of(rule: Rule) -> list[str]:
    """The labels of a rule, in order."""
    terms = (*rule.inputs, *rule.outputs)
    return list(dict.fromkeys(label for term in terms for dim in term.dims for section in dim for label in section))


def _terms(own: CustomOp, rule: Rule, arguments: Mapping[str, Any], inputs: int) -> tuple[Term, ...]:
    """A term for each tensor of the call: none for a missing optional tensor, one per item of a list."""
    if len(rule.inputs) == inputs and not any(isinstance(value, tuple) for value in arguments.values()):
        return rule.inputs
    able = [p for p in own.parameters if p.tensor or (p.tensor is None and _is_tensor(arguments[p.name]))]
    if len(able) != len(rule.inputs):
        able = [
            p for p in own.parameters
            if _is_tensor(arguments[p.name]) or (arguments[p.name] is None and p.tensor is not False)
        ]  # fmt: skip
    if len(able) != len(rule.inputs):
        raise RuleError(
            f"the rule {rule.text!r} of {own.name} has {len(rule.inputs)} inputs, and the call has {inputs} tensors; "
            "annotate the parameters that are tensors, or make the rule a function of the arguments"
        )
    terms: list[Term] = []
    for parameter, term in zip(able, rule.inputs, strict=True):
        value = arguments[parameter.name]
        terms += [term] * (len(value) if isinstance(value, tuple) else 0 if value is None else 1)
    return tuple(terms)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Slot) or (isinstance(value, tuple) and any(isinstance(item, Slot) for item in value))


def custom_inputs(own: CustomOp, rule: Rule) -> Iterator[Values]:
    """Inputs with a small size for every label, with all optional tensors and without; may raise NotProbed."""
    sizes = _sizes(rule)
    plain = [p for p in own.parameters if p.tensor is None and p.default is NOTHING and p.name not in sizes]
    tensors = [p for p in own.parameters if p.tensor or p in plain]
    if len(tensors) != len(rule.inputs):
        raise NotProbed(f"the rule has {len(rule.inputs)} inputs, but {len(tensors)} parameters may be tensors")
    if any(term.anything for term in rule.inputs):
        raise NotProbed("the rule has ?, which fixes no shape")
    missing = [p.name for p in own.parameters if p not in tensors and p.usual is NOTHING and p.name not in sizes]
    if missing:
        raise NotProbed(f"there is no test value for its argument {missing[0]}")
    optional = [p for p in tensors if p.default is None]
    generator = torch.Generator().manual_seed(1)
    for left_out in ([], optional) if optional else ([],):
        shapes = [_shape(term, sizes) for term in rule.inputs]
        for kinds in islice(_kinds(len(tensors)), 32):
            values: Values = {p.name: sizes.get(p.name, p.usual) for p in own.parameters if p not in tensors}
            top = min((size for shape in shapes for size in shape if size > 1), default=4)
            for p, shape, kind in zip(tensors, shapes, kinds, strict=True):
                drawn = [_draw(shape, kind, top, generator) for _ in range(2 if p.several else 1)]
                values[p.name] = None if p in left_out else drawn if p.several else drawn[0]
            ordered = {p.name: values[p.name] for p in own.parameters}
            if _runs(own, ordered):
                yield ordered
                break
        else:
            raise NotProbed("it does not run on the CPU with random inputs of the shapes of the rule")


def _sizes(rule: Rule) -> dict[str, int]:
    spare = (size for size in chain(LABEL_SIZES, range(22, 1000)) if size not in rule.sizes.values())
    return {**{label: next(spare) for label in labels_of(rule) if label not in rule.sizes}, **rule.sizes}


def _shape(term: Term, sizes: Mapping[str, int]) -> tuple[int, ...]:
    dims = []
    for sections in term.dims:
        total = 0
        for section in sections:
            part = 1
            for label in section:
                part *= sizes[label]
            total += part
        dims.append(total)
    return (*((5, 7) if term.star else ()), *dims)


def _kinds(count: int) -> Iterator[tuple[str, ...]]:
    """The kinds of inputs: floats if the op takes them, else integers for one or more."""
    for floats in ("float64", "float32"):
        mixed = product((floats, "int64"), repeat=count)
        yield from sorted(mixed, key=lambda kinds: kinds.count("int64"))[:-1]


def _draw(shape: Sequence[int], kind: str, top: int, generator: torch.Generator) -> Tensor:
    if kind == "int64":
        return torch.randint(top, tuple(shape), generator=generator)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(getattr(torch, kind))


def _runs(own: CustomOp, values: Values) -> bool:
    try:
        return bool(flat(own.run(*values.values())))
    except Exception:  # it may reject these inputs with any error
        return False


def call_of(own: CustomOp, values: Values) -> tuple[OpCall, list[Tensor]]:
    """A call of a custom op; floats require grad if it has a backward."""
    tensors = [x.detach().clone() for x in flat(list(values.values()))]
    slots = iter(range(len(tensors)))

    def argument(value: Any) -> Any:
        if isinstance(value, Tensor):
            return Slot(next(slots))
        if isinstance(value, torch.dtype):
            return Dtype(str(value).removeprefix("torch."))
        return tuple(argument(inner) for inner in value) if isinstance(value, list | tuple) else value

    arguments = tuple((p.name, argument(values[p.name])) for p in own.parameters)
    wanted = [x.requires_grad_(x.is_floating_point()) for x in tensors]
    op = Op(name=f"/ {own.name}", target=own.target, inputs=tuple(f"x{at}" for at in range(len(tensors))), outputs=(),
            arguments=arguments)  # fmt: skip
    results = own(op, wanted)
    trained = _has_backward(results, wanted)
    outputs = tuple(_value(f"y{at}", y, trained and y.requires_grad) for at, y in enumerate(results))
    inputs = tuple(_value(f"x{at}", x, trained and x.requires_grad) for at, x in enumerate(wanted))
    return OpCall(replace(op, outputs=tuple(y.name for y in outputs)), inputs, outputs), [x.detach() for x in tensors]


def _has_backward(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
    ends = [y for y in outputs if y.requires_grad]
    starts = [x for x in inputs if x.requires_grad]
    try:
        if ends:
            torch.autograd.grad(ends, starts, [torch.ones_like(y) for y in ends], allow_unused=True)
    except Exception:  # an op without backward may raise anything
        return False
    return bool(ends)


def _value(name: str, x: Tensor, gradient: bool) -> Value:
    return Value(name=name, shape=tuple(x.shape), dtype=str(x.dtype).removeprefix("torch."), gradient=gradient)


def check_rule(own: CustomOp, rule: RuleLike, values: Values, communicating: Callable[[SplitTrial], None]) -> None:
    """Raise a RuleError that names the split that breaks the rule; `communicating` checks splits that communicate."""
    call, inputs = call_of(own, values)
    bound = custom_rule(own, rule, call)
    if bound is None:
        return
    analysis = analyse(one_op(call), lambda call: (bound, ""))
    (op,) = analysis.graph.ops
    signature = analysis.signatures[op.name]
    torch.manual_seed(0)
    for role in signature.roles:
        for parts in parts_of(role.size):
            try:
                _judge(analysis, op, role.name, parts, inputs, own, communicating)
            except WrongSplit as error:
                hint = _hint(own, bound, call, inputs, role.label)
                raise RuleError(f"the rule {bound.text!r} of {own.name} is wrong: {error.details}{hint}") from error
    for group in signature.linear_groups():
        try:
            _judge(analysis, op, f"{PASS_PARTIAL}{group}", 2, inputs, own, communicating)
        except WrongSplit as error:
            fault = error.details.partition("over 2 ")[2]
            raise RuleError(
                f"the rule {bound.text!r} of {own.name} is wrong: it is not linear in ~{group}: with pending sums "
                f"there {fault}; leave ~{group} out"
            ) from error


def _judge(
    analysis: Analysis,
    op: Op,
    role: str,
    parts: int,
    inputs: Sequence[Tensor],
    own: CustomOp,
    communicating: Callable[[SplitTrial], None],
) -> None:
    trial = SplitTrial(analysis, op, role, parts, inputs, own)
    if trial.communicates:
        communicating(trial)
    else:
        trial.judge([trial.rank(index, own) for index in range(parts)])


def _hint(own: CustomOp, rule: Rule, call: OpCall, inputs: Sequence[Tensor], label: str) -> str:
    """Suggest what the rule should say about a label, by trying."""
    for change, other in _variants(rule, label, call):
        analysis = analyse(one_op(call), lambda call, other=other: (other, ""))  # type: ignore[misc]
        (op,) = analysis.graph.ops
        roles = [role for role in analysis.signatures[op.name].roles if role.label == label]
        try:
            for parts in parts_of(roles[0].size):
                trial = SplitTrial(analysis, op, roles[0].name, parts, inputs, own)
                trial.judge([trial.rank(index, own) for index in range(parts)])
        except (RuleError, IndexError):
            continue
        return f"; did you mean {change}?"
    return f"; write {label}^ if it can't be split"


def _variants(rule: Rule, label: str, call: OpCall) -> Iterator[tuple[str, Rule]]:
    """Alternatives for a summed label of a rule."""
    if label not in rule.sums:
        return
    for at, term in enumerate(rule.inputs):
        if not term.bias and not any(label in section for dim in term.dims for section in dim):
            inputs = tuple(replace(other, bias=other.bias or at == k) for k, other in enumerate(rule.inputs))
            yield f"& at input {at + 1}, which is added once", replace(rule, inputs=inputs)
    kinds: tuple[Reduction, ...] = ("sum",) if any(value.gradient for value in call.outputs) else ("sum", "max", "min")
    for kind in kinds:
        if rule.sums[label] != kind:
            yield f"{label}+{'' if kind == 'sum' else kind}", replace(rule, sums={**rule.sums, label: kind})
