"""Says why gloo ends the process when ranks enter different collectives, instead of its abort without a word.

A message that is longer than its receiver expects raises an exception in a thread of gloo's own, where nobody can catch
it: the C++ runtime calls its terminate handler. This one calls back into Python, where the ranks still can find
out what each of them was about to do. Any other exception goes to the handler that was there before.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

_HANDLER = ctypes.CFUNCTYPE(None)
_installed: Any = None  # the handler, which must live as long as the process
_respond: Callable[[], None] | None = None


def on_gloo_abort(respond: Callable[[], None]) -> None:
    """Call `respond`, which does not return, when gloo is about to abort the process."""
    global _installed, _respond
    _respond = respond
    if _installed is not None:
        return
    try:
        runtime = ctypes.CDLL("libstdc++.so.6")
        set_handler, kind_of = runtime._ZSt13set_terminatePFvvE, runtime.__cxa_current_exception_type
    except (OSError, AttributeError):  # another C++ runtime: gloo's abort stays as it is
        return
    set_handler.restype = kind_of.restype = ctypes.c_void_p
    before: Any = None

    def terminate() -> None:
        kind = kind_of()
        # A std::type_info is a pointer to its methods and one to its name.
        name = ctypes.c_char_p.from_address(kind + ctypes.sizeof(ctypes.c_void_p)).value if kind else b""
        if _respond is not None and b"gloo" in (name or b""):
            _respond()
        if before:
            _HANDLER(before)()

    _installed = _HANDLER(terminate)
    before = set_handler(_installed)
