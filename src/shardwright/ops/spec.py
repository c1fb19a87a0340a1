"""What the compiler knows about an op: `OpSpec`, and the registry of all of them.

An op is defined once, in the file of its family, with everything that any part of the compiler
asks about it. What is not given has a default that is safe: an op without a rule runs replicated
(or is probed), one of which nobody says what autograd saves saves all it can, and one without a
printer is printed as `torch.ops`. So a new elementwise op is one line (`elementwise` of pointwise.py gives the rule):

    elementwise("special_zeta", saved="0 1", kernel=Kernel.FUNCTION)

Names are those of aten without their overload ("add"); ops of other libraries, the runtime's and
the user's are named in full ("runtime.dropout"). What differs between the overloads of an op is
given by overload: `rule={"Tensor": add, "Scalar": elementwise}`.

    capture/   canonical, write_back, dense, gradient, result
    rules/     rule, keyed
    lower/     localize, dense, fresh, folds_bias, delays_weights
    emit/      operator, prints, reads and what belongs to them, chains, returns_list
    cost/      time: kernel, passes, operands, flops, collectives
               memory: saved, saved_extra, flattens, view, turns, may_copy, keeps_order, back, work,
               strided, keeps_storage
    verify/    runs
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from ..errors import RuleError
from ..ir import Op
from ..layout import Mesh
from ..rules import registry
from ..rules.notation import parse
from ..rules.registry import OpCall, RuleFunction
from ..rules.signature import Signature
from .contexts import (
    AlgorithmCollective,
    LocalCall,
    Passes,
    ProgramOnRank,
    RankRun,
    RuntimeArguments,
    SavedForBackward,
    TracedCall,
    ViewWrite,
)
from .printing import Printer
from .reading import Reader


class Kernel(Enum):
    """What runs an op, and so how long it takes (`cost/time.py`)."""

    POINTWISE = "goes over its tensors in memory, as often as `passes` says"
    FUNCTION = "the same, with arithmetic that shows where there are no units for it"
    POOLING = "compares neighbours"
    MATMUL = "multiplies and adds"
    CONVOLUTION = "multiplies and adds, in windows"
    ATTENTION = "fused attention"
    VIEW = "nothing, unless it has to copy"
    PART = "nothing; backward puts gradients together"
    JOIN = "puts tensors together; backward is nothing"
    LOOKUP = "reads rows where they are wanted"
    CREATION = "writes a new tensor"
    CROSS_ENTROPY = "a log_softmax and the loss of each row"


POINTWISE = Passes()
MATMULS = frozenset({Kernel.MATMUL, Kernel.CONVOLUTION, Kernel.ATTENTION})

Strides = tuple[int, ...]
RuleSource = RuleFunction | str
Rewriting = Callable[[TracedCall], list[str]]
Saved = Callable[[LocalCall, Signature, Sequence[bool] | None], str | SavedForBackward | None]
Work = Callable[[LocalCall, Signature, Sequence[bool] | None], tuple[float, float]]
Collectives = Callable[[LocalCall, Signature, Mapping[str, tuple[str, ...]], Mesh], list[AlgorithmCollective]]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSpec:
    """Everything that is known about an op. All fields have a default: what nobody says is not known.

    rule            how it may be split: in the notation, a function of the call, or one of these by overload
    keyed           its random masks are drawn by the position of an element, so that a split op draws the same
    localize        the op as a rank calls it, where arguments hold sizes or an algorithm does the split
    canonical       its one spelling in a graph, as the names of the values that stand for its results
    view            strides of its result, which shares memory with the first input; None there: it has to copy
    write_back      for a view: the value of its input after a write to it
    turns           a view that changes the order of dims
    may_copy        a view that has to copy where it joins dims of what was turned
    dense           its result lies in order, whatever the strides of its inputs
    keeps_order     its result lies in the order of what it reads
    fresh           its result is a tensor of its own that backward does not read, and may be summed in place
    folds_bias      a bias added to its result right after it becomes its argument
    delays_weights  gradients of its weights can be computed later (`weights.` ops)
    gradient        which outputs may have a gradient
    result          what its result is called where the user's code has no name for it; "0": as its first input
    operator        the sign of Python that it prints as
    prints, reads   its call in generated code, written and read back; one is never derived from the other
    positional      how many arguments of `reads` are given by position
    keywords        keywords of the call that the op has other names for
    defaults          values that an op and its line may say or leave out, the one without the other
    unprinted       arguments for the plan, which a line does not have
    expects         arguments of a line that are not those of the op
    leaves_out      whether a line may leave out an argument
    chains          a view that prints as a method of its input, so that several may stand in one line
    state           for a reshard that takes a state (`dst=R`): the keyword
    returns_list    it returns a list, be it of one tensor
    kernel          what runs it; for an op that is not aten's, None says: a matmul if it has the arithmetic of one
    passes          how often it goes over its tensors
    operands        of a matmul: the inputs that are multiplied, None for all
    flops           of the forward pass at global shape, where the rule does not say them
    bytes           that the forward pass reads and writes at global shape, where its passes do not say it
    saved           for backward: numbers of inputs, "r" for the result, "r1" for the last one, "indices" for all inputs
                    that are integers; "0*" only if another input has a gradient; None: all that it may
    saved_extra     bytes that it saves beside its inputs and outputs
    flattens        it multiplies rows, and copies them first if they don't lie in one run
    back            how backward makes the gradient of each input, the last word for all that follow: "pass" passes on
                    the one that comes in ("pass_same": if it is as large as the result), "free" makes one that has
                    no memory of its own, "fresh" a new tensor
    work            what it allocates and releases, forward and backward: in sizes of its result, or a function in bytes
    strided         its backward reads a gradient of any strides; others copy one that a sum has expanded
    keeps_storage   its result is reduced in a storage that was allocated for all elements, and stays as large
    collectives     what its algorithms send
    runs            how a rank runs it, for ops of the runtime
    """

    rule: RuleSource | Mapping[str, RuleSource] | None = None
    keyed: bool = False
    localize: Callable[[ProgramOnRank, Op], Op | tuple[Op, ...]] | None = None
    canonical: Rewriting | Mapping[str, Rewriting] | None = None
    view: Callable[[Op, Strides, Strides, Strides], Strides | None] | None = None
    write_back: Callable[[ViewWrite], str] | None = None
    turns: bool = False
    may_copy: bool = False
    dense: bool = False
    keeps_order: bool = False
    fresh: bool = False
    folds_bias: bool = False
    delays_weights: bool = False
    gradient: Literal["all", "first", "none"] = "all"
    result: str | None = None
    operator: Mapping[str, str] = field(default_factory=dict)
    prints: Printer | None = None
    reads: str | Reader | None = None
    positional: int | None = None
    keywords: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    unprinted: tuple[str, ...] = ()
    expects: Callable[[Op, dict[str, Any], Mapping[str, str]], dict[str, Any]] | None = None
    leaves_out: Callable[[Op, str, Any], bool] | None = None
    chains: bool = False
    state: str | None = None
    returns_list: bool = False
    kernel: Kernel | None = None
    passes: Passes = POINTWISE
    operands: tuple[int, ...] | None = (0, 1)
    flops: Callable[[OpCall], float] | None = None
    bytes: Callable[[OpCall], float] | None = None
    saved: str | Saved | None = None
    saved_extra: Callable[[LocalCall, Signature], float] | None = None
    flattens: bool = False
    back: str = "fresh"
    work: tuple[float, float] | Work = (0.0, 0.0)
    strided: bool = False
    keeps_storage: bool = False
    collectives: Collectives | None = None
    runs: Callable[[RankRun, RuntimeArguments], Any] | None = None

    def rewriting(self, overload: str) -> Rewriting | None:
        """The canonical form of an overload."""
        return self.canonical.get(overload) if isinstance(self.canonical, Mapping) else self.canonical

    @property
    def is_matmul(self) -> bool:
        """Whether it is a matmul, a convolution or attention."""
        return self.kernel in MATMULS


UNKNOWN = OpSpec()
_SPECS: dict[str, OpSpec] = {}
_BY_TARGET: dict[str, OpSpec] = {}  # as they were asked for


def input_work(forward: float, backward: float) -> Work:
    """Transient memory in sizes of the first input, where the result is smaller."""

    def work(call: LocalCall, signature: Signature, flat: Sequence[bool] | None) -> tuple[float, float]:
        return forward * call.inputs[0].bytes, backward * call.inputs[0].bytes

    return work


def define(names: str, **fields: Any) -> OpSpec:
    """Define ops that have everything in common; see `OpSpec` for the fields."""
    spec = OpSpec(**fields)
    for name in names.split():
        if name in _SPECS:
            raise RuleError(f"{name} is defined twice")
        _SPECS[name] = spec
        if spec.keyed:
            registry.KEYED.add(target_of(name))
        for target, rule in _rules(name, spec.rule):
            registry.register(target, rule)
    return spec


def define_custom(target: str, spec: OpSpec) -> None:
    """Define, or define anew, an op of the user's under its full name."""
    _SPECS[target] = spec
    _BY_TARGET.pop(target, None)
    if spec.rule is not None and not isinstance(spec.rule, Mapping):
        registry.register(target, _fixed(spec.rule) if isinstance(spec.rule, str) else spec.rule)


def spec_of(target: str) -> OpSpec:
    """What is known about an op."""
    spec = _BY_TARGET.get(target)
    if spec is None:
        spec = _BY_TARGET[target] = _SPECS.get(op_kind(target), UNKNOWN)
    return spec


def op_kind(target: str) -> str:
    """The name that an op is defined by: "linear" for "aten.linear.default", "runtime.dropout" as it is."""
    library, _, rest = target.partition(".")
    return rest.partition(".")[0] if library == "aten" else target


def target_of(name: str, overload: str = "default") -> str:
    """An op in full: "aten.linear.default" for "linear"."""
    return name if "." in name else f"aten.{name}.{overload}"


def defined() -> Iterator[tuple[str, OpSpec]]:
    """All ops by name."""
    return iter(_SPECS.items())


def _rules(name: str, rule: RuleSource | Mapping[str, RuleSource] | None) -> Iterator[tuple[str, RuleFunction]]:
    """The targets that have a rule."""
    if rule is None:
        return
    for overloads, source in rule.items() if isinstance(rule, Mapping) else (("default", rule),):
        function = _fixed(source) if isinstance(source, str) else source
        for overload in overloads.split():
            yield target_of(name, overload), function


def _fixed(text: str) -> RuleFunction:
    parsed = parse(text)
    return lambda call: parsed
