"""Changes to a file as an attacker, an editor or a disk would make them."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from random import Random
from typing import Any

DEEP: list[Any] = []
for _ in range(150):
    DEEP = [DEEP]

VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 7, 10**8, 10**10, 2**31, 2**63, -(2**63), 10**40, 0.5, -0.5, 1e308, float("nan"),
    float("inf"), "", "x", "0", "x" * 20_000, "../..", "/etc/passwd", "\0", "\ud800", "0-99999999", "a.b-c", '"""', "*",
    "blocks.*", [], {}, [[]], [None], {"": None}, {"$": "tensor", "key": "none"}, {"$": "scalar", "dtype": "V", "value":
    2_600_000_000}, {"$": "bytes", "base64": "!"}, {"$": "tuple"}, {"$": 3}, {"$": "dict", "items": [[[], 1]]},
    [1] * 1000, {"tp": 10**8}, {"tp": 10**5, "dp": 10**5}, DEEP,
)  # fmt: skip


def places(data: Any, route: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something can be changed."""
    yield route
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield from places(value, (*route, key))


def _parent(data: Any, route: tuple[Any, ...]) -> Any:
    for key in route[:-1]:
        data = data[key]
    return data


def mutate(data: Any, random: Random) -> Any:
    """A copy with one to three changes of its structure."""
    data = copy.deepcopy(data)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        routes = list(places(data))
        route = random.choice(routes)
        if not route:
            if random.random() < 0.1:
                data = copy.deepcopy(random.choice(VALUES))
            continue
        above = _parent(data, route)
        change = random.randrange(6)
        if change == 0:
            del above[route[-1]]
        elif change == 1 and isinstance(above, dict):
            above[random.choice(("x", "mesh", "$", "", "a" * 300))] = copy.deepcopy(random.choice(VALUES))
        elif change == 2 and len(routes) > 1:
            other = random.choice(routes[1:])
            above[route[-1]] = copy.deepcopy(_parent(data, other)[other[-1]])
        elif change == 3 and isinstance(above[route[-1]], int | float):
            above[route[-1]] = str(above[route[-1]])
        elif change == 4 and isinstance(above[route[-1]], list):
            above[route[-1]] = above[route[-1]] * 3
        else:
            above[route[-1]] = copy.deepcopy(random.choice(VALUES))
    return data


def mutate_text(text: bytes, random: Random) -> bytes:
    """A change that no structure survives: bytes cut, doubled, exchanged, put in."""
    at, other = sorted(random.randrange(len(text) + 1) for _ in range(2))
    change = random.randrange(6)
    if change == 0:
        return text[:at]
    if change == 1:
        return text[:other] + text[at:]
    if change == 2:
        return text[:at] + bytes([random.randrange(256)]) + text[at + 1 :]
    if change == 3:
        nested = random.choice((b"[" * 5000, b"{" * 5000, b'{"a":' * 2000, b"\xff\xfe", b"- " * 3000))
        return text[:at] + nested + text[at:]
    if change == 4:
        return text[:at] + b"9" * random.choice((9, 20, 5000)) + text[at:]
    return random.choice((b"", b"null", b"[]", b"\0" * 100, b'{"a": 1, "a": 2}', BOMB, MERGE, LOOP))


_LEVELS = [(chr(letter), ", ".join([f"*{chr(letter - 1)}"] * 10)) for letter in range(ord("b"), ord("k"))]
BOMB = "".join(["a: &a [x, x]\n", *(f"{name}: &{name} [{inner}]\n" for name, inner in _LEVELS)]).encode()
MERGE = "".join(["a: &a {k: v}\n", *(f"{name}: &{name} {{<<: [{inner}]}}\n" for name, inner in _LEVELS)]).encode()
LOOP = b"a: &a [*a]\ngroups: *a\n"


def as_json(data: Any) -> bytes:
    return json.dumps(data).encode(errors="surrogatepass")
