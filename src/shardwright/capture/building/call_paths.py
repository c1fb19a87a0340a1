"""The arguments and results of a call as paths that people know ("input_ids", "batch['x']")."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


def input_paths(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """A path for every leaf of (args, kwargs), in the order in which they are flattened."""
    names = _positional_names(module, len(args))
    paths = []
    for keys, _ in pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))[0]:
        side: Any = keys[0]
        first: Any = keys[1]
        rest = keys[2:]
        head = names[first.idx] if side.idx == 0 else str(first.key)
        paths.append(head + pytree.keystr(rest))
    return paths


def _positional_names(module: nn.Module, count: int) -> list[str]:
    names: list[str] = []
    try:
        parameters = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}[{index}]" for index in range(count - len(names))]
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    return [*names, *(f"args[{index}]" for index in range(len(names), count))][:count]


def output_paths(spec: pytree.TreeSpec) -> list[str]:
    """A path for every leaf of the result; a single tensor is "output"."""
    mark = torch.empty(0, device="meta")  # containers may look at what they hold
    leaves = pytree.tree_unflatten([mark] * spec.num_leaves, spec)
    paths = []
    for keys, _ in pytree.tree_flatten_with_path(leaves)[0]:
        text = pytree.keystr(keys)
        first = keys[0] if keys else None
        if isinstance(first, pytree.MappingKey) and isinstance(first.key, str):
            text = first.key + pytree.keystr(keys[1:])
        elif isinstance(first, pytree.GetAttrKey):
            text = first.name + pytree.keystr(keys[1:])
        paths.append(text or "output")
    return paths


def register_containers(tree: Any) -> None:
    """Teach torch's pytrees every dataclass, enum, HF cache and plain object in a tree of arguments or results.

    A container that its library registered without names for its children, such as diffusers' outputs, gets them.
    """
    kind = type(tree)
    node = pytree.SUPPORTED_NODES.get(kind)
    if node is not None and node.flatten_with_keys_fn is None:
        pytree.SUPPORTED_NODES[kind] = node._replace(flatten_with_keys_fn=_with_keys(node.flatten_fn))
    if isinstance(tree, Mapping):
        children = list(tree.values())
    elif isinstance(tree, tuple | list):
        children = list(tree)
    elif kind.__module__ == "transformers.cache_utils":
        children = list(vars(tree).values())
        if kind not in pytree.SUPPORTED_NODES:
            _register_by_attributes(kind)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        children = [getattr(tree, field.name) for field in dataclasses.fields(tree)]
        if kind not in pytree.SUPPORTED_NODES:
            torch.export.register_dataclass(kind)
    elif _is_record(tree):
        children = list(vars(tree).values())
        if kind not in pytree.SUPPORTED_NODES:
            _register_by_attributes(kind, every=True)
    else:
        return
    for inner in children:
        register_containers(inner)


def _with_keys(flatten: pytree.FlattenFunc) -> pytree.FlattenWithKeysFunc:
    """A flatten function that names children by the keys in the context, as that of a dict has them, or by number."""

    def flatten_with_keys(tree: Any) -> tuple[list[tuple[pytree.KeyEntry, Any]], Any]:
        children, context = flatten(tree)
        named = isinstance(context, list | tuple) and [type(key) for key in context] == [str] * len(children)
        numbers = range(len(children))
        keys: list[Any] = [pytree.MappingKey(k) for k in context] if named else [pytree.SequenceKey(n) for n in numbers]
        return list(zip(keys, children, strict=True)), context

    return flatten_with_keys


def _is_record(tree: Any) -> bool:
    """Whether an object is nothing but its attributes, and these are tensors, numbers and the like: a config."""
    kind = type(tree)
    create: Any = kind.__new__
    plain = create is object.__new__ or kind is SimpleNamespace
    if callable(tree) or not plain or not hasattr(tree, "__dict__"):
        return False
    values = list(vars(tree).values())
    for value in values:
        values += value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    simple = (torch.Tensor, type(None), bool, int, float, complex, str, list, tuple, dict, Enum)
    return all(isinstance(v, simple) or dataclasses.is_dataclass(v) or _is_record(v) for v in values)


def _register_by_attributes(kind: type, every: bool = False) -> None:
    """An object whose attributes are its children; unless it is `every` one, what has no tensors is fixed."""

    def split(tree: Any) -> tuple[list[str], list[tuple[str, Any]]]:
        names, fixed = [], []
        for name, value in sorted(vars(tree).items()):
            nested = isinstance(value, torch.Tensor | list | tuple | dict) or type(value) in pytree.SUPPORTED_NODES
            if every or nested:
                names.append(name)
            else:
                fixed.append((name, value))
        return names, fixed

    def flatten(tree: Any) -> tuple[list[Any], Any]:
        names, fixed = split(tree)
        return [getattr(tree, name) for name in names], (tuple(names), tuple(fixed))

    def flatten_with_keys(tree: Any) -> tuple[list[tuple[pytree.KeyEntry, Any]], Any]:
        children, context = flatten(tree)
        return [(pytree.GetAttrKey(name), child) for name, child in zip(context[0], children, strict=True)], context

    def unflatten(children: Any, context: Any) -> Any:
        create: Any = kind.__new__
        instance = create(kind)
        instance.__dict__.update(dict(context[1]))
        instance.__dict__.update(zip(context[0], children, strict=True))
        return instance

    pytree.register_pytree_node(
        kind,
        flatten,
        unflatten,
        serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
        flatten_with_keys_fn=flatten_with_keys,
    )
