"""The code you can read: a program becomes one Python file, whatever the number of ranks.

`file.py` writes it (`calls.py` has one printer for each kind of op, `layers.py` folds equal layers into loops), and
`validate.py` reads it back and compares it with the program, op by op.
"""

from .file import Emitted, emit
from .validate import validate

__all__ = ["Emitted", "emit", "validate"]
