"""Random numbers that a forward draws from Python or numpy: a trace would fix the number that it has drawn.

Where it is compared with a probability of 0 or 1 (a layer drop that is off) the draw decides nothing. That is seen by
tracing again with the smallest and with the largest number there is. Every other draw is refused.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from ...errors import CaptureError

_LARGEST = 1.0 - 2.0**-53


class PythonDraws:
    """The states of the generators of Python and numpy, as they were when this was made."""

    def __init__(self) -> None:
        self._before = _states()

    def used(self) -> list[str]:
        """Whose generators have been drawn from since."""
        now = _states()
        return [name for name, state in self._before.items() if now[name] != state]


def _states() -> dict[str, Any]:
    states: dict[str, Any] = {"random": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        states["numpy.random"] = (kind, keys.tobytes(), *rest)
    return states


@contextmanager
def draws_kept() -> Iterator[None]:
    """Draws that are made within this don't count: what is tried out leaves the generators as they were."""
    numpy = sys.modules.get("numpy")
    state, other = random.getstate(), numpy and numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(other)


@contextmanager
def drawing(number: float) -> Iterator[None]:
    """Within this, draws of one number between 0 and 1 give this one."""

    def fixed_draw(plain: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: plain(*args, **kwargs) if args or kwargs else number

    def between(plain: Callable[..., Any]) -> Callable[..., Any]:
        def draw(low: float = 0.0, high: float = 1.0, size: Any = None) -> Any:
            return low + (high - low) * number if size is None else plain(low, high, size)

        return draw

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(random, "random", fixed_draw(random.random)))
        stack.enter_context(mock.patch.object(random, "uniform", between(random.uniform)))
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            for name in ("rand", "random", "random_sample"):
                plain = getattr(numpy.random, name)
                stack.enter_context(mock.patch.object(numpy.random, name, fixed_draw(plain)))
            stack.enter_context(mock.patch.object(numpy.random, "uniform", between(numpy.random.uniform)))
        yield


def check_draws(draws: PythonDraws, graph: str, trace_again: Callable[[], str], places: list[str]) -> None:
    """Refuse a trace that depends on what it has drawn. `trace_again` gives the graph of another trace."""
    generators = draws.used()
    for number in (0.0, _LARGEST) if generators else ():
        with drawing(number):
            again = PythonDraws()
            if trace_again() != graph or again.used():
                raise _refusal(generators, places)


def _refusal(generators: list[str], places: list[str]) -> CaptureError:
    where = f" ({', '.join(sorted(set(places))[:3])})" if places else ""
    return CaptureError(
        f"the forward draws a number from {' and '.join(generators)}{where}, which a program would draw once and then "
        "never again. Draw it with torch (torch.rand, F.dropout) where it is computed with; where it decides which "
        "layers run, draw it outside and pass it to the forward (a bool or an int is a constant of a program of its "
        "own); or leave the submodule as it is with sw.opaque."
    )
