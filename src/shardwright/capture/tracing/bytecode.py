"""What the code of a function reads by name: globals, closure variables, and attributes of these.

    scale * SETTINGS.width + TABLE["a"]      scale                 a chain of one name
                                             SETTINGS.width        a global, then an attribute
                                             TABLE["a"]            a global, then an item

Only names are found here; what they stand for is the business of variables.py.
"""

from __future__ import annotations

import dis
import types
from dataclasses import dataclass
from typing import Any, Literal

Step = tuple[Literal["attribute", "item"], Any]

_FREE = frozenset({"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"})
_ATTRIBUTE = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_SILENT = frozenset({"CACHE", "EXTENDED_ARG", "PUSH_NULL", "PRECALL", "NOP"})
_SUBSCRIPTS = frozenset({"BINARY_SUBSCR", "BINARY_OP"})  # the latter as `[]`, from Python 3.14 on


@dataclass(frozen=True, slots=True)
class Chain:
    """A variable with the attributes and items that are read of it one after the other."""

    free: bool  # a closure variable; else a global
    name: str
    steps: tuple[Step, ...] = ()
    argument: Any = None  # the constant that comes next: of a call, its first argument
    line: int = 0


@dataclass(frozen=True, slots=True)
class CodeReads:
    """What one code object mentions, functions inside of it left out."""

    chains: tuple[Chain, ...]
    names: frozenset[str]  # attributes of anything, also as the strings that getattr may be given
    inner: tuple[types.CodeType, ...]  # functions and comprehensions that are written in it


_KNOWN: dict[types.CodeType, CodeReads] = {}


def reads_of(code: types.CodeType) -> CodeReads:
    """What a code object reads."""
    reads = _KNOWN.get(code)
    if reads is None:
        reads = _KNOWN[code] = _read(code)
    return reads


def _read(code: types.CodeType) -> CodeReads:
    chains: dict[Chain, None] = {}
    names = {literal for literal in code.co_consts if isinstance(literal, str) and literal.isidentifier()}
    chain: Chain | None = None
    constant: Any = None  # of the instruction before, if that was one and followed a chain
    line = code.co_firstlineno

    def end() -> None:
        if chain is not None:
            chains[chain] = None

    for instruction in dis.get_instructions(code):
        name, value = instruction.opname, instruction.argval
        if instruction.starts_line:
            line = instruction.positions.lineno or line if instruction.positions is not None else line
        if name in _SILENT:
            continue
        if name in _ATTRIBUTE or name == "LOAD_SUPER_ATTR":
            names.add(value)
        if name == "LOAD_GLOBAL" or (name in _FREE and value in code.co_freevars):
            end()
            chain, constant = Chain(name != "LOAD_GLOBAL", value, line=line), None
        elif chain is not None and name in _ATTRIBUTE:
            chain, constant = _then(chain, ("attribute", value)), None
        elif chain is not None and name.startswith(("LOAD_CONST", "LOAD_SMALL_INT")) and constant is None:
            constant = (value,)
        elif chain is not None and constant is not None and _subscripts(name, instruction.argrepr):
            chain, constant = _then(chain, ("item", constant[0])), None
        else:
            if chain is not None and constant is not None:
                chain = Chain(chain.free, chain.name, chain.steps, constant[0], chain.line)
            end()
            chain = constant = None
    end()
    inner = tuple(literal for literal in code.co_consts if isinstance(literal, types.CodeType))
    return CodeReads(tuple(chains), frozenset(names), inner)


def _then(chain: Chain, step: Step) -> Chain:
    return Chain(chain.free, chain.name, (*chain.steps, step), None, chain.line)


def _subscripts(name: str, shown: str) -> bool:
    return name in _SUBSCRIPTS and (name != "BINARY_OP" or shown == "[]")
