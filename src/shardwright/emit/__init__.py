"""The code you can read: a program becomes one Python file, whatever the number of ranks."""

from .file import Emitted, emit

__all__ = ["Emitted", "emit"]
