"""Branches and loops that data decides: `torch.cond`, `scan`, `while_loop`, each one op with its own graphs.

The op names the graphs it runs (`Graph.branches`). What a graph reads comes in as operands of
the op, parameters too, so that their gradients are those of any op. Equal graphs are one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, fx

from ... import control_flow
from ...ir import Graph, Input, Output, check
from ...ops.user_calls import COND, SCAN, WHILE
from ..captured import ImportedFunction
from ..failure import unsupported
from .aliases import TensorHandle
from .finish import drop_dead, join_repeats, ops_of, promote_floats, values_of
from .graph_builder import GraphBuilder, OpOrigin, ValueInfo, ValueRef
from .value_names import identifier, value_names

Walk = Callable[[fx.GraphModule, GraphBuilder, Sequence[TensorHandle], Callable[[Tensor], TensorHandle]], Sequence[Any]]
"""Converts a graph module into a draft, given handles for its placeholders and a way to add constants."""


@dataclass(slots=True)
class BranchGraphs:
    """The graphs that ops of one model run, by name."""

    promote: bool = False
    graphs: dict[str, Graph] = field(default_factory=dict)
    _known: dict[str, str] = field(default_factory=dict)

    def add(
        self,
        module: fx.GraphModule,
        kind: str,
        infos: Sequence[ValueInfo],
        walk: Walk,
        place: OpOrigin,
        names: Sequence[str] = (),
    ) -> tuple[str, list[int], list[Tensor]]:
        """The name of a graph for a module, which of its operands it reads, and constants that it wants besides."""
        builder = GraphBuilder()
        nodes = [node.name for node in module.graph.nodes if node.op == "placeholder"]
        handles = [TensorHandle(builder.value(info)) for info in infos]
        options = {
            handle.name: _operand_name(name, place) for handle, name in zip(handles, names or nodes, strict=True)
        }
        constants: list[Tensor] = []

        def constant(tensor: Tensor) -> TensorHandle:
            info = ValueInfo(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            handles.append(TensorHandle(builder.value(info)))
            options[handles[-1].name] = "constant"
            constants.append(tensor)
            return handles[-1]

        results = walk(module, builder, handles[: len(infos)], constant)
        if any(handle.version for handle in handles) or not all(isinstance(result, TensorHandle) for result in results):
            raise unsupported("it writes to its operands, or returns a number", place.source, "Return tensors only.")
        ends = [result.read() for result in results]
        if self.promote:
            promote_floats(builder)
        join_repeats(builder)
        ends = [builder.now(end) for end in ends]
        drop_dead(builder, ends)
        read = {name for step in builder.steps for name in step.inputs()} | set(ends)
        takes = [at for at, handle in enumerate(handles) if handle.name in read or names]
        names_of = value_names(builder, {handles[at].name: options[handles[at].name] for at in takes})
        graph = Graph(
            name=kind, entry=place.path,
            values=values_of(builder, names_of),
            inputs=tuple(Input(value=names_of[handles[at].name], path=options[handles[at].name]) for at in takes),
            parameters=(), buffers=(), ops=ops_of(builder, names_of),
            outputs=tuple(Output(path=f"[{at}]", value=names_of[end]) for at, end in enumerate(ends)),
        )  # fmt: skip
        return self._named(check(graph)), takes, constants

    def _named(self, graph: Graph) -> str:
        """The name of a graph; one that does the same and draws nothing is known by the first one's name."""
        number = {name: at for at, name in enumerate(graph.values)}
        steps = [
            (op.target, [number[x] for x in op.inputs], [number[x] for x in op.outputs], op.arguments, op.no_grad)
            for op in graph.ops
        ]
        values = [replace(value, name="") for value in graph.values.values()]
        ends = [number[output.value] for output in graph.outputs if output.value is not None]
        key = repr((graph.name, values, len(graph.inputs), steps, [op.autocast for op in graph.ops], ends))
        key += graph.entry if draws_in_branch(graph) else ""
        if key not in self._known:
            others = sum(re.fullmatch(rf"{graph.name}(_\d+)?", name) is not None for name in self.graphs)
            self._known[key] = f"{graph.name}_{others}" if others else graph.name
            self.graphs[self._known[key]] = replace(graph, name=self._known[key])
        return self._known[key]


def draws_in_branch(graph: Graph) -> bool:
    """Whether an op of a graph draws random numbers."""
    return any(op.draws for op in graph.ops)


def _operand_name(node: str, place: OpOrigin) -> str:
    """The name of an operand, as the module that decides would call it."""
    return identifier(re.sub(r"^[pbc]_", "", node).removeprefix(f"{identifier(place.module)}_"))


def refuse_draws(graph: Graph, place: OpOrigin) -> None:
    """A loop would draw the same numbers in every turn: random numbers are drawn by the name of their op."""
    if draws_in_branch(graph):
        raise unsupported(
            "the body of a loop draws random numbers", place.source, "Draw them before the loop and pass them in."
        )


# -- run op by op ------------------------------------------------------------------------------

Run = Callable[[str, Sequence[Tensor]], list[Tensor]]
"""Runs one of the graphs."""


def functions(run: Run) -> dict[str, ImportedFunction]:
    """The functions behind the three ops, for whoever runs a graph op by op."""

    def body(name: str) -> Callable[..., tuple[Tensor, ...]]:
        return lambda *operands: tuple(run(name, operands))

    def cond(
        predicate: Tensor, then: str, then_takes: list[int], other: str, other_takes: list[int], operands: list[Tensor]
    ) -> Any:
        then_operands, other_operands = ([operands[at] for at in takes] for takes in (then_takes, other_takes))
        return control_flow.cond(predicate, body(then), then_operands, body(other), other_operands)

    def scan(step: str, init: list[Tensor], xs: list[Tensor], constants: list[Tensor]) -> Any:
        return control_flow.scan(body(step), init, xs, constants)

    def while_loop(test: str, turn: str, carried: list[Tensor], constants: list[Tensor]) -> Any:
        return control_flow.while_loop(lambda *operands: run(test, operands)[0], body(turn), carried, constants)

    calls: Mapping[str, Callable[..., Any]] = {COND: cond, SCAN: scan, WHILE: while_loop}
    return {
        target: ImportedFunction(call=call, module="shardwright", qualname=target) for target, call in calls.items()
    }


def operands_of(handles: Sequence[Any], place: OpOrigin) -> tuple[ValueRef, ...]:
    """Tensors given to a branch or a loop."""
    if not all(isinstance(handle, TensorHandle) for handle in handles):
        raise unsupported("a branch or a loop is given a number", place.source, "Pass it as a tensor.")
    return tuple(ValueRef(handle.read()) for handle in handles)
