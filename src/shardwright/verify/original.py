"""The original on one device: the reference for the compiled program.

Usually the model itself runs, as the user wrote it. In two cases its graph runs instead, op by
op (`capture.run`):

- casts to float32 in the model's own code end parity in float64 at 5e-8. The compiled
  program is then promoted, and the reference has to be promoted alike;
- dropout in a checkpointed region draws again in backward, where no mask can be passed to the model.

The graph is then itself compared with the model, without promotion, so that a capture bug is
not missed ("capture" in the report). Dropout draws the global masks of which the ranks of the compiled
program use their shards, and other random ops draw by the keys that they have there.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from ..capture import CapturedGraph, ImportedFunction, MaskFacts, capture_pair, cast, casting, copy_module, run
from ..capture.building.schema import is_random_call, named_arguments
from ..capture.interpret import overload_of
from ..capture.user_calls.opaque_call import forwards
from ..compile import copy_to_meta
from ..errors import InputError
from ..ir import Graph, Op
from ..ops.random import DROPOUTS
from ..ops.user_calls import OPAQUE
from ..precision import Precision
from ..rules import is_random
from ..runtime.algorithms.random import ExactDropout, Randomness
from .measure import Row, compare, largest
from .run import Entry, Tensors, VerifyTask, first_names, follow, named_outputs, trainable

NARROW = frozenset({"float32", "float16", "bfloat16"})
UNKEYED = re.compile(r"\.(cauchy|geometric|log_normal|alpha_dropout|feature_)")
"""Random ops without a key."""
CAPTURE_TOLERANCE = 1e-6


class Original:
    """A copy of the model, trained eagerly or by its graph."""

    def __init__(
        self,
        task: VerifyTask,
        *,
        by_graph: bool | None = None,
        promote: bool | None = None,
        captures: dict[tuple[Entry, bool], CapturedGraph] | None = None,
    ) -> None:
        self.task = task
        self.module, self.narrow = _cast(copy_module(task.module), task.precision)
        if "train" in task.entries and not self.module.training:
            self.module.train()
        self.promote = task.promote if promote is None else promote
        self.captures = {} if captures is None else captures
        self.random = Randomness(seed=task.seed, exact=True)
        self.optimizer = task.optimizer(trainable(self.module.parameters()))
        self.by_graph = self._needs_graph() if by_graph is None else by_graph

    def _needs_graph(self) -> bool:
        graphs = [self._captured(entry, promote=False).graph for entry in self.task.entries]
        return any(self._promotes(graph) or redraws(graph) for graph in graphs)

    def _promotes(self, graph: Graph) -> bool:
        return self.promote and casts(graph)

    def captured(self, entry: Entry) -> CapturedGraph:
        """The graph of the compiled program."""
        plain = self._captured(entry, promote=False)
        return self._captured(entry, promote=True) if self._promotes(plain.graph) else plain

    def _captured(self, entry: Entry, promote: bool) -> CapturedGraph:
        if (entry, promote) not in self.captures:
            skeleton = copy_to_meta(self.module)
            if entry == "eval":
                skeleton.eval()
            call, exact = (self.task.args, self.task.kwargs), self.task.precision
            with casting(cast(skeleton, exact), exact):
                plain, wide = capture_pair(
                    skeleton, *call, entry=entry, real=self._real, promote=self._promotes,
                    masks=MaskFacts(buffers=dict(self.module.named_buffers(remove_duplicate=False))),
                )  # fmt: skip
            self.captures[entry, False] = plain
            if wide is not None:
                self.captures[entry, True] = wide
        return self.captures[entry, promote]

    def _real(self) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        return self.module, self.task.args, self.task.kwargs

    def forward(self, entry: Entry) -> Any:
        if entry == "train":
            self.random.advance()
        elif self.module.training:
            self.module.eval()
        if self.by_graph:
            return self._run_graph(entry)
        captured = self.captured(entry)
        names = [op.name for op in captured.graph.ops if is_random(op)]
        with (
            exact_dropout(captured.graph, self.random) as mode,
            KeyedDraws(self.random, names) if names else nullcontext(),
            drawn_alike(self.module, captured, self.random, mode),
        ):
            return self._call()

    def _call(self) -> Any:
        """The model itself, in its precision. Low-precision weights come from fp32 master weights, as on the ranks."""
        device = next((parameter.device.type for parameter in self.module.parameters()), "cpu")
        with casting(self.module, self.task.precision, device):
            if not self.narrow:
                return self.module(*self.task.args, **self.task.kwargs)
            return functional_call(self.module, self._narrowed(), self.task.args, self.task.kwargs)

    def _narrowed(self) -> dict[str, Tensor]:
        named = dict(self.module.named_parameters())
        return {name: named[name].to(dtype) for name, dtype in self.narrow.items()}

    def _run_graph(self, entry: Entry) -> Any:
        captured = self.captured(entry)
        graph, functions = with_masks(captured, self.random)
        tensors = captured.flatten(self.task.args, self.task.kwargs)
        buffers = dict(self.module.named_buffers(remove_duplicate=False))
        narrow, first = self._narrowed(), first_names(self.module)
        named = self.module.named_parameters(remove_duplicate=False)
        parameters = {key: narrow.get(first[key], parameter) for key, parameter in named}
        before = {key: buffer.clone() for key, buffer in buffers.items()}  # backward must read what forward read
        outputs, updates, _ = run(replace(captured, graph=graph), tensors, parameters, before, functions)
        with torch.no_grad():
            for key, value in updates.items():
                (buffers[key] if key in buffers else parameters[key]).copy_(value)
        return captured.unflatten(outputs)

    def gradients(self) -> Tensors:
        return {name: None if p.grad is None else p.grad.clone() for name, p in self._named() if p.requires_grad}

    def parameters(self) -> Tensors:
        return {name: parameter.detach().clone() for name, parameter in self._named()}

    def buffers(self) -> Tensors:
        return {name: buffer.detach().clone() for name, buffer in self.module.named_buffers(remove_duplicate=False)}

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        first = first_names(self.module)
        return ((name, p) for name, p in self.module.named_parameters(remove_duplicate=False) if first[name] == name)


def _cast(module: nn.Module, precision: Precision) -> tuple[nn.Module, dict[str, torch.dtype]]:
    """A module cast to a precision, and the low-precision copies of parameters that stay fp32 master weights."""
    wide = {name: parameter.data for name, parameter in module.named_parameters()}
    cast(module, precision)
    narrow: dict[str, torch.dtype] = {}
    for name, parameter in module.named_parameters():
        if precision.master and parameter.requires_grad and parameter.dtype.itemsize < wide[name].dtype.itemsize:
            narrow[name], parameter.data = parameter.dtype, wide[name]
    return module, narrow


def check_original(side: Original) -> tuple[list[Row], str]:
    """If the reference is the model's graph: report entries that compare it with the model itself, and a note."""
    if not side.by_graph:
        return [], ""
    dropped = any(redraws(side.captured(entry).graph) for entry in side.task.entries)
    why = "because of dropout in checkpointed regions" if dropped else "in float64 throughout"
    note = f"the reference is the model's graph run op by op, {why}"
    return _check_graph(side), note


def _check_graph(side: Original) -> list[Row]:
    """One step of the model against its own graph, neither promoted."""
    once = replace(side.task, steps=1)

    def again(by_graph: bool) -> Original:
        return Original(once, by_graph=by_graph, promote=False, captures=side.captures)

    traced, model = again(True), again(False)
    rows: list[Row] = []
    for entry in once.entries:
        a, b = (_prefixed(f"{entry} ", named_outputs(run_side.forward(entry))) for run_side in (traced, model))
        rows += compare("capture", a, b, 0.0, CAPTURE_TOLERANCE)
    if "train" in once.entries and not redraws(
        model.captured("train").graph
    ):  # else its backward would draw other masks
        (first,), (other,) = (follow(again(by_graph), once).steps for by_graph in (True, False))
        scale = largest(other.gradients.values())
        rows += compare("capture", first.gradients, other.gradients, scale, CAPTURE_TOLERANCE)
    return rows


def _prefixed(prefix: str, tensors: Mapping[str, Tensor | None]) -> Tensors:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def casts(graph: Graph) -> bool:
    """Whether a graph in float64 computes anything in a lower precision, or might."""
    return any(value.dtype in NARROW for value in graph.values.values()) or any(op.autocast for op in graph.ops)


def redraws(graph: Graph) -> bool:
    """Whether a checkpointed region has random ops."""
    return any(op.region is not None for op in (*dropouts(graph), *filter(is_random, graph.ops)))


def dropouts(graph: Graph) -> list[Op]:
    """The dropout ops, in the order of their calls."""
    odd = next((op for op in graph.ops if UNKEYED.search(op.target)), None)
    inside = (op for branch in graph.branches.values() for op in branch.ops)
    odd = odd or next((op for op in inside if UNKEYED.search(op.target) or is_random(op) or drops(op)), None)
    if odd is not None:
        raise InputError(f"{odd} draws random numbers, which can't be made the same on one device and on many; "
                         'verify in evaluation mode with entries=("eval",)')  # fmt: skip
    return [op for op in graph.ops if drops(op)]


def drops(op: Op) -> bool:
    return op.target in DROPOUTS or bool(op.argument("dropout_p", 0.0))


@contextmanager
def exact_dropout(graph: Graph, random: Randomness) -> Iterator[ExactDropout | None]:
    """Within this context, the model draws the masks of the ops of its graph."""
    names = [op.name for op in dropouts(graph)]
    if not names:
        yield None
        return
    with ExactDropout(random, names) as mode:
        yield mode


def drawn_alike(
    module: nn.Module, captured: CapturedGraph, random: Randomness, mode: ExactDropout | None
) -> AbstractContextManager[None]:
    """Within this context, opaque submodules draw what those of the compiled program draw."""
    paths = dict.fromkeys(call.path for call in captured.opaques.values())
    parts = ((path, module.get_submodule(path)) for path in paths)
    return forwards((part, _drawing(part.forward, path, random, mode)) for path, part in parts)


def _drawing(
    forward: Callable[..., Any], path: str, random: Randomness, mode: ExactDropout | None
) -> Callable[..., Any]:
    calls = itertools.count()

    def drawn(*args: Any, **kwargs: Any) -> Any:
        number = next(calls)
        key = f"{path}@{number}" if number else path
        with random.drawing(key), mode.resting() if mode is not None else nullcontext():
            return forward(*args, **kwargs)

    return drawn


def with_masks(captured: CapturedGraph, random: Randomness) -> tuple[Graph, dict[str, ImportedFunction]]:
    """The graph with calls of our dropout instead of torch's, and opaque submodules that draw as on the ranks."""
    graph = captured.graph
    targets = {op.name: f"call.exact.{number}" for number, op in enumerate(dropouts(graph))}
    functions = {
        targets[op.name]: ImportedFunction(call=_masked(op, random), module="", qualname="")
        for op in graph.ops
        if op.name in targets
    }
    for number, op in enumerate(op for op in graph.ops if is_random(op)):
        targets[op.name] = f"call.drawn.{number}"
        functions[targets[op.name]] = ImportedFunction(call=_drawn(op, random), module="", qualname="")
    if OPAQUE in captured.functions:
        functions[OPAQUE] = replace(captured.functions[OPAQUE], call=_keyed(captured.functions[OPAQUE].call, random))
    ops = tuple(replace(op, target=targets.get(op.name, op.target)) for op in graph.ops)
    return (replace(graph, ops=ops) if targets else graph), functions


def _keyed(run: Callable[..., Any], random: Randomness) -> Callable[..., Any]:
    def call(key: str, *rest: Any) -> Any:
        with random.drawing(key):
            return run(key, *rest)

    return call


def _drawn(op: Op, random: Randomness) -> Callable[..., Any]:
    """A random op that draws by its key."""
    names = [name for name, _ in op.arguments]

    def call(*values: Any) -> Any:
        with random.drawing(op.name):
            return overload_of(op)(**dict(zip(names, values, strict=True)))

    return call


class KeyedDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Make a model draw by keys: its random ops, in order, are the ops named."""

    def __init__(self, random: Randomness, names: Sequence[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.random, self.names = random, iter(names)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_random_call(func, named_arguments(func, args, kwargs or {}, lambda value: value)):
            return func(*args, **(kwargs or {}))
        name = next(self.names, None)
        if name is None:
            raise InputError(f"the model draws more random numbers than its graph does ({func})")
        with self.random.drawing(name):
            return func(*args, **(kwargs or {}))


def _masked(op: Op, random: Randomness) -> Callable[..., Tensor]:
    names = [name for name, _ in op.arguments]

    def call(*values: Any) -> Tensor:
        arguments = dict(zip(names, values, strict=True))
        if op.target in DROPOUTS:
            return random.dropout(values[0], arguments["p"], op.name)
        return random.attention(**arguments, op=op.name)

    return call
