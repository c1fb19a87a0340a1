"""From exported nodes to the graph builder: one pass, no_grad and autocast regions inlined.

The exported graph is not functional and nests regions as submodules. The pass gives every
node a handle (aliases.py), reads arguments through the handles, turns writes into new
values, and hands each call to canonical.py.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from ...errors import CaptureError
from ...ir import Dtype
from ...ops.user_calls import COND, OPAQUE, SCAN, WHILE
from ..captured import ImportedFunction
from ..failure import unsupported
from ..tracing.grad_mode import grad_is_off
from ..tracing.python_numbers import Numbers, numbers
from ..user_calls.kept import MARKER, KeptCalls, map_places, registered_function
from ..user_calls.kept import UserCall as Marker
from ..user_calls.opaque_call import OpaqueCall
from .aliases import AliasView, TensorHandle
from .autocast import Autocast
from .canonical import AtenCall, write
from .control_flow import BranchGraphs, Walk, operands_of, refuse_draws
from .graph_builder import GraphBuilder, OpOrigin, ValueInfo, ValueRef
from .in_place_ops import view_in_place, write_to, written_arguments
from .masked_selection import SelectionOp, is_selection, refuse_selections, selections
from .schema import literal, named_arguments, target_name, value_infos
from .source_lines import origin_of

ASSERTIONS = ("_assert_tensor_metadata", "_assert_async", "_assert_scalar", "sym_constrain", "_functional_assert")
NUMBERS = ("aten.item.default", "aten._local_scalar_dense.default", "aten.sym_size.int")
MAYBE_VIEWS = frozenset({"reshape", "contiguous", "to", "flatten", "reshape_as", "type_as", "detach_"})
MakeConstant = Callable[[torch.Tensor], TensorHandle]


@dataclass(frozen=True, slots=True)
class Modes:
    no_grad: bool = False
    autocast: str | None = None
    cached: bool = False  # inside any autocast region


@dataclass(slots=True)
class GraphConversion:
    builder: GraphBuilder
    user_calls: KeptCalls
    parameters: frozenset[str]  # their values: autocast casts each once
    constant: MakeConstant  # a handle for a tensor that stands in the graph itself
    branches: BranchGraphs
    functions: dict[str, ImportedFunction] = field(default_factory=dict)
    autocast: Autocast = field(default_factory=Autocast)
    _casts: dict[tuple[str, str], str] = field(default_factory=dict)

    def run(self, graph: fx.GraphModule, arguments: Sequence[Any], modes: Modes) -> Any:
        """Walk a graph with handles (or literals) for its placeholders; what it returns."""
        env: dict[fx.Node, Any] = {}
        placeholders = iter(arguments)
        checks = _checks(graph.graph)
        for node in graph.graph.nodes:
            if node in checks:
                continue
            if node.op == "placeholder":
                env[node] = next(placeholders)
            elif node.op == "get_attr":
                attribute = getattr(graph, node.target)
                env[node] = self.constant(attribute) if isinstance(attribute, torch.Tensor) else attribute
            elif node.op == "output":
                return refuse_selections(fx.node.map_arg(node.args[0], env.__getitem__))
            elif node.target is operator.getitem:
                env[node] = env[node.args[0]][node.args[1]]
            else:
                try:
                    env[node] = self._node(node, env, modes)
                except CaptureError as error:
                    if error.path is None:
                        error.path = origin_of(node.meta, no_grad=False, autocast=None).module
                    raise
        raise AssertionError("a graph without output")

    def _node(self, node: fx.Node, env: dict[fx.Node, Any], modes: Modes) -> Any:
        args = fx.node.map_arg(node.args, env.__getitem__)
        kwargs = fx.node.map_arg(node.kwargs, env.__getitem__)
        op: Any = node.target
        if isinstance(op, torch._ops.HigherOrderOperator):
            return self._region(node, str(op), args, modes)
        place = origin_of(node.meta, no_grad=grad_is_off(node, modes.no_grad), autocast=modes.autocast)
        counted = target_of(op) in NUMBERS or not isinstance(op, torch._ops.OpOverload)
        if target_of(op) in NUMBERS or (numbers((args, kwargs)) and (counted or not selections((args, kwargs)))):
            return self._number(node, args, kwargs, place)
        if not isinstance(op, torch._ops.OpOverload):
            name = getattr(op, "__name__", op)
            remedy = "Write it without torch.vmap and torch.func, or keep the submodule out with sw.opaque(submodule)."
            raise unsupported(f"it calls {name}, which is no tensor operation", place.source, remedy)
        if op._opname.startswith("as_strided") and not _in_order(node.args[0]):
            remedy = "Call .contiguous() before it, or use unfold, view or slices."
            raise unsupported("as_strided reads memory that is not in order", place.source, remedy)
        if target_name(op) == MARKER:
            return self._call(args, node.meta["val"], place)
        if not modes.autocast and (selections((args, kwargs)) or is_selection(op, args, self.builder)):
            return self._select(node, args, kwargs, place)
        if modes.autocast:
            args, kwargs, place = self._cast(node, args, kwargs, place)
        return self._op(op, args, kwargs, node.meta.get("val"), place)

    def _number(self, node: fx.Node, args: Any, kwargs: Any, place: OpOrigin) -> Any:
        """A node that takes a number out of a tensor, or computes with one (python_numbers.py)."""
        op: Any = node.target
        numbers_of = Numbers(self.builder, replace(place, autocast=None))
        if target_of(op) == "aten.sym_size.int":
            selection, dim = args
            size = self.builder.infos[selection.dense].shape
            return numbers_of.count(selection.mask) if dim == 0 else size[selection.lead + dim - 1]
        if target_of(op) in NUMBERS:
            return numbers_of.take(args[0])
        if not isinstance(op, torch._ops.OpOverload):
            return numbers_of.compute(op, args, node.meta["val"])
        values = fx.node.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
        result = numbers_of.apply(op, args, kwargs, node.meta["val"], torch.utils._pytree.tree_leaves(values))
        if isinstance(result, TensorHandle):
            return result
        if place.autocast and self.autocast.casts(place.autocast, op, *values):
            remedy = "Take the number after the autocast region, or leave .item() out."
            raise unsupported("autocast changes an op with a number taken out of a tensor", place.source, remedy)
        return self._op(result[0], (), result[1], node.meta["val"], place)

    def _select(self, node: fx.Node, args: Any, kwargs: Any, place: OpOrigin) -> Any:
        """An op on what a boolean mask selects (masked_selection.py)."""
        value = node.meta.get("val")
        dtype = str(value.dtype).removeprefix("torch.") if isinstance(value, torch.Tensor) else ""
        selection = SelectionOp(self.builder, node.target, place, dtype, lambda argument: _read(argument, place))
        if selections((args, kwargs)):
            return selection.apply(args, kwargs)
        if node.target is torch.ops.aten.masked_select.default:
            return selection.take_all(*args)
        return selection.take(args[0], args[1][0])

    def _region(self, node: fx.Node, name: str, args: Sequence[Any], modes: Modes) -> Any:
        if name == "wrap_with_set_grad_enabled":
            return self.run(args[1], args[2:], replace(modes, no_grad=not args[0]))
        if name == "wrap_with_autocast":
            device, dtype, enabled, _, inner, *rest = args
            dtype = dtype or torch.get_autocast_dtype(device)
            region = f"{device}:{str(dtype).removeprefix('torch.')}" if enabled else None
            if enabled and device != "cpu":
                self.builder.notes.append(f"autocast for {device} does nothing: models are captured as if on the CPU")
            if not modes.cached:
                self._casts.clear()  # autocast forgets its casts when the outermost region ends
            return self.run(inner, rest, replace(modes, autocast=region, cached=True))
        place = origin_of(node.meta, no_grad=modes.no_grad, autocast=None)
        if name == "cond" and not isinstance(args[0], TensorHandle):
            return self.run(args[1] if args[0] else args[2], args[3], modes)
        if name in ("cond", "scan", "while_loop"):
            call = {"cond": self._cond, "scan": self._scan, "while_loop": self._while}[name](args, modes, place)
            names = self.builder.emit(*call, value_infos(node.meta["val"], place.source), place)
            self.builder.loose.update(names)
            return [TensorHandle(value) for value in names]
        remedy = "Write it with plain tensor operations, or keep the submodule out with sw.opaque(submodule)."
        raise unsupported(f"the graph has no way to say {name}", place.source, remedy)

    def _cond(self, args: Sequence[Any], modes: Modes, place: OpOrigin) -> tuple[str, dict[str, Any]]:
        predicate, then, other, inputs = args
        operands = list(operands_of(inputs, place))
        arguments: dict[str, Any] = {"predicate": ValueRef(predicate.read())}
        for role, kind, module in (("then", "cond_then", then), ("other", "cond_else", other)):
            infos = [self.builder.infos[operand.name] for operand in operands[: len(inputs)]]
            name, takes, constants = self.branches.add(module, kind, infos, self._walk(modes), place)
            more = range(len(operands), len(operands) + len(constants))
            operands += [ValueRef(self.constant(tensor).read()) for tensor in constants]
            numbers = [*range(len(inputs)), *more]
            arguments |= {role: name, f"{role}_takes": tuple(numbers[at] for at in takes)}
        return COND, {**arguments, "operands": tuple(operands)}

    def _scan(self, args: Sequence[Any], modes: Modes, place: OpOrigin) -> tuple[str, dict[str, Any]]:
        step, *groups = args
        init, xs, captured = (operands_of(group, place) for group in groups)
        known = self.builder.infos
        slices = [replace(known[ref.name], shape=known[ref.name].shape[1:]) for ref in xs]
        infos = [*(known[ref.name] for ref in init), *slices, *(known[ref.name] for ref in captured)]
        names = [*_numbered("carry", init), *_numbered("x", xs), *_numbered("captured", captured)]
        name, constants = self._loop_body(step, "scan_step", infos, names, modes, place)
        return SCAN, {"step": name, "init": init, "xs": xs, "captured": (*captured, *constants)}

    def _while(self, args: Sequence[Any], modes: Modes, place: OpOrigin) -> tuple[str, dict[str, Any]]:
        test, body, *groups = args
        carried, captured = (operands_of(group, place) for group in groups)
        infos = [self.builder.infos[ref.name] for ref in (*carried, *captured)]
        names = [*_numbered("carry", carried), *_numbered("captured", captured)]
        graphs = []
        for module, kind in ((test, "while_test"), (body, "while_body")):
            name, constants = self._loop_body(module, kind, infos, names, modes, place)
            if constants:
                remedy = "Make the constant a buffer, or make it before the loop and pass it in."
                raise unsupported("a loop makes a constant tensor", place.source, remedy)
            graphs.append(name)
        return WHILE, {"test": graphs[0], "body": graphs[1], "carried": carried, "captured": captured}

    def _loop_body(
        self, module: fx.GraphModule, kind: str, infos: list[ValueInfo], names: list[str], modes: Modes, place: OpOrigin
    ) -> tuple[str, list[ValueRef]]:
        """The graph of one turn, which takes everything it is given, and the constants that it wants besides."""
        if any(info.gradient for info in infos):  # what is carried may come to have a gradient
            infos = [replace(info, gradient=info.floating) for info in infos]
        name, _, constants = self.branches.add(module, kind, infos, self._walk(modes), place, names)
        refuse_draws(self.branches.graphs[name], place)
        return name, [ValueRef(self.constant(tensor).read()) for tensor in constants]

    def _walk(self, modes: Modes) -> Walk:
        def walk(
            module: fx.GraphModule, builder: GraphBuilder, handles: Sequence[TensorHandle], constant: MakeConstant
        ) -> Sequence[Any]:
            inner = replace(self, builder=builder, parameters=frozenset(), constant=constant, _casts={})
            results = inner.run(module, handles, modes)
            return results if isinstance(results, tuple | list) else [results]

        return walk

    def _op(self, op: Any, args: Any, kwargs: Any, value: Any, place: OpOrigin) -> Any:
        target = target_name(op)
        if value is not None and not isinstance(value, torch.Tensor | tuple | list):
            raise unsupported(
                f"the line takes a number out of a tensor ({target}), and a graph has no numbers in its tensors",
                place.source,
                "Keep it a tensor, compute it outside of the model and pass it, or keep the submodule out of the graph "
                "with sw.opaque(submodule).",
            )
        raw = {a.name: argument for a, argument in zip(op._schema.arguments, args, strict=False)} | dict(kwargs)
        arguments = named_arguments(op, args, kwargs, lambda argument: _read(argument, place))
        if op.namespace not in ("aten", "prims"):
            self.functions[target] = ImportedFunction(call=op, module="torch.ops", qualname=target)
        view = view_in_place(op)
        if view is not None:  # what was y is another tensor of the same memory from here on
            made_here = any(raw["self"].root().name in step.outputs for step in self.builder.steps)
            if not made_here:
                remedy = f"Use {view._opname} and a new name for what it gives."
                raise unsupported(f"{target} changes the shape of what it is given", place.source, remedy)
            return self._op(view, args, kwargs, value, place)
        written = written_arguments(op)
        if written and target != "aten.detach_.default":
            return write_to(self.builder, op, arguments, {name: raw[name] for name in written}, place)
        names = write(AtenCall(self.builder, target, arguments, value_infos(value, place.source), place))
        if target == "aten.batch_norm.default" and len(names) == 5:
            raw["running_mean"].write(self.builder, names[3], place)
            raw["running_var"].write(self.builder, names[4], place)
            names = names[:1]
        return self._handles(op, arguments, raw, names, value, place)

    def _handles(
        self, op: Any, arguments: dict[str, Any], raw: dict[str, Any], names: list[str], value: Any, place: OpOrigin
    ) -> Any:
        """Handles for the outputs, as views of an input where they share its memory."""
        target = target_name(op)
        many = isinstance(value, tuple | list)
        values = list(value) if many else [value]
        shared = [a.name for a in op._schema.arguments if a.alias_info is not None]
        argument = shared[0] if shared else ""
        base = raw.get(argument)
        infos = value_infos(value, place.source)

        def take(parent: str) -> list[str]:
            return write(AtenCall(self.builder, target, {**arguments, argument: ValueRef(parent)}, infos, place))

        handles: list[TensorHandle] = []
        for index, (name, tensor) in enumerate(zip(names, values, strict=False)):
            handle = TensorHandle(name, storage=_storage(tensor))
            if isinstance(base, TensorHandle) and (op._opname not in MAYBE_VIEWS or handle.storage == base.storage):
                handle.parent, handle.view = base, AliasView(take, target, arguments, index)
                handle.seen = base.root().version
            handles.append(handle)
        if many:
            return handles
        return handles[0] if handles else None

    def _cast(self, node: fx.Node, args: Any, kwargs: Any, place: OpOrigin) -> tuple[Any, Any, OpOrigin]:
        """The arguments of an op inside autocast, cast as autocast would."""
        assert place.autocast is not None
        op: Any = node.target
        values = fx.node.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
        casts = self.autocast.casts(place.autocast, op, *values)
        if casts is None:
            return args, kwargs, place
        place = replace(place, autocast=None)
        numbers = iter(range(len(node.all_input_nodes) * 64))

        def change(argument: Any) -> Any:
            if isinstance(argument, list | tuple):
                return type(argument)(change(inner) for inner in argument)
            if isinstance(argument, dict):
                return {name: change(inner) for name, inner in argument.items()}
            if not isinstance(argument, TensorHandle):
                return argument
            dtype = casts.get(next(numbers))
            return argument if dtype is None else self._cast_once(argument, str(dtype).removeprefix("torch."), place)

        return change(tuple(args)), change(dict(kwargs)), place

    def _cast_once(self, handle: TensorHandle, dtype: str, place: OpOrigin) -> TensorHandle:
        """The cast of a parameter that the region has made already is used again, as autocast's cache does."""
        name = handle.read()
        if (name, dtype) in self._casts:
            return TensorHandle(self._casts[name, dtype])
        info = ValueInfo(self.builder.infos[name].shape, dtype)
        arguments = {"self": ValueRef(name), "dtype": Dtype(dtype)}
        converted = write(AtenCall(self.builder, "aten._to_copy.default", arguments, [info], place))[0]
        if name in self.parameters:
            self._casts[name, dtype] = converted
        return TensorHandle(converted)

    def _call(self, args: Sequence[Any], values: Sequence[torch.Tensor], place: OpOrigin) -> list[TensorHandle]:
        """A marker as a call of what it stands for: a user's function, or an opaque submodule."""
        call = self.user_calls.calls[args[0]]
        tensors = [ValueRef(handle.read()) for handle in args[1]]
        if isinstance(call, OpaqueCall):
            return self._opaque(call, tensors, value_infos(values, place.source), place)
        assert isinstance(call, Marker)
        own = registered_function(call)
        if own is not None:
            path, parameters = own.path, own.names
            function = ImportedFunction(call=own.run, module="", qualname=path, plain=own.run_plain)
        else:
            cls: Any = call.function
            path = f"{cls.__module__}.{cls.__qualname__}"
            parameters = tuple(f"arg{at}" for at in range(len(call.arguments)))
            function = ImportedFunction(call=cls.apply, module=cls.__module__, qualname=f"{cls.__qualname__}.apply")
            if call.changed:
                remedy = "Register it with sw.register_op, or write it out of place."
                raise unsupported(f"the autograd function {path} changes its input", place.source, remedy)
        pairs = zip(parameters, map_places(call.arguments, tensors), strict=True)
        arguments = {name: _read(value, place) for name, value in pairs}
        target = f"call.{path}"
        self.functions[target] = function
        names = self.builder.emit(target, arguments, value_infos(values, place.source), place)
        for at, index in call.changed.items():
            args[1][at].write(self.builder, names[index], place)
        return [TensorHandle(name) for name in names]

    def _opaque(
        self, call: OpaqueCall, tensors: Sequence[ValueRef], infos: list[ValueInfo], place: OpOrigin
    ) -> list[TensorHandle]:
        arguments = {
            "op_key": call.key,
            "batch": call.batch,
            "rule": call.rule,
            "tensors": tuple(tensors[: call.tensors]),
            "names": call.names,
            "state": tuple(tensors[call.tensors :]),
        }
        names = self.builder.emit(OPAQUE, arguments, infos, place, "experts" if call.rule else "opaque")
        for name, output in zip(names, call.outputs, strict=True):
            if not output.gradient:
                self.builder.infos[name] = replace(self.builder.infos[name], gradient=False)
        self.builder.loose.update(names)
        return [TensorHandle(name) for name in names]


def target_of(op: Any) -> str:
    return target_name(op) if isinstance(op, torch._ops.OpOverload) else ""


def _numbered(word: str, operands: Sequence[Any]) -> list[str]:
    return [word] if len(operands) == 1 else [f"{word}{at}" for at in range(len(operands))]


def _checks(graph: fx.Graph) -> set[fx.Node]:
    """The assertions, and the numbers that are taken out of tensors for them alone: they compute nothing."""
    checks: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        asserts = any(word in getattr(node.target, "_opname", "") for word in ASSERTIONS)
        number = node.op == "call_function" and not isinstance(node.meta.get("val"), torch.Tensor | tuple | list)
        pure = not isinstance(node.target, torch._ops.HigherOrderOperator) and node.users
        if asserts or (number and pure and all(user in checks for user in node.users)):
            checks.add(node)
    return checks


def _in_order(node: Any) -> bool:
    value = node.meta["val"]
    return bool(value.is_contiguous() and value.storage_offset() == 0)


def _read(argument: Any, place: OpOrigin) -> Any:
    if isinstance(argument, ValueRef):
        return argument
    if isinstance(argument, TensorHandle):
        return ValueRef(argument.read())
    if isinstance(argument, list | tuple):
        return tuple(_read(inner, place) for inner in argument)
    return literal(argument, place.source)


def _storage(value: Any) -> int:
    return int(value.untyped_storage()._cdata) if isinstance(value, torch.Tensor) else 0
