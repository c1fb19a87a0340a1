"""The kinds of parameter storage. To add one, write its file and list it here."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import LayoutError
from .replicated import Replicated
from .storage import Storage
from .zero1 import Zero1
from .zero2 import Zero2
from .zero3 import Zero3

KINDS: tuple[type[Storage], ...] = (
    Replicated,
    Zero1,
    Zero2,
    Zero3,
)

SHARDED_KINDS = tuple(kind for kind in KINDS if kind.sharded())
"""Those that can be asked for along an axis, which are policies of plan strings too."""


SHARDED_TENSORS = {kind.name: len(kind.sharded()) for kind in KINDS}
"""How many of parameter, gradient and optimizer state a kind shards: the number of a ZeRO level, by the kind's name."""


def sharded_tensors(written: Mapping[str, int | str]) -> int:
    """The number of the ZeRO level of a storage as plan files write it."""
    return max((SHARDED_TENSORS[storage_kind(symbol).name] for symbol in written.values()), default=0)


def of_zero(number: int) -> type[Storage]:
    """The kind of a ZeRO level; 0 is replicated."""
    return next(kind for kind in KINDS if SHARDED_TENSORS[kind.name] == number)


def kind_named(name: str) -> type[Storage]:
    """The kind of a name, as plan strings write it."""
    return next(kind for kind in KINDS if kind.name == name)


def storage_kind(symbol: int | str) -> type[Storage]:
    """The kind that plan files and generated code write as `symbol`."""
    for kind in SHARDED_KINDS:
        if symbol == kind.symbol:
            return kind
    known = ", ".join(f"{kind.symbol!r} ({kind.title})" for kind in SHARDED_KINDS)
    raise LayoutError(f"{symbol!r} is no kind of parameter storage; there are {known}")


def parse_storage(written: Mapping[str, int | str]) -> Storage:
    """{"dp": 3} as the storage that it stands for."""
    if not written:
        return Replicated()
    symbols = list(dict.fromkeys(written.values()))
    if len(symbols) > 1:
        raise LayoutError(f"its storage is {dict(written)}; use one kind of storage for all axes")
    return storage_kind(symbols[0])(tuple(written))
