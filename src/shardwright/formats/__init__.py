"""Files that somebody else may have written: read within limits, and checked against a schema before anything is used.

`reading.py` reads JSON and YAML into plain data, and refuses what is too large, too deep or ambiguous. `schema.py`
compares that data with what a file should have, and lists every fault with its place in the file. What the values
mean is the business of the package that the file belongs to. `own_folders.py` writes files of our own. What is
trusted: SECURITY.md.
"""

from .own_folders import OwnFolders
from .reading import StrictLoader, compose_yaml, parse_json, parse_yaml, read_json, read_text, read_yaml
from .schema import (
    Faults,
    Schema,
    anything,
    boolean,
    either,
    integer,
    listing,
    literal,
    mapping,
    nothing,
    number,
    raise_faults,
    record,
    show,
    text,
    where,
)

__all__ = [
    "Faults",
    "OwnFolders",
    "Schema",
    "StrictLoader",
    "anything",
    "boolean",
    "compose_yaml",
    "either",
    "integer",
    "listing",
    "literal",
    "mapping",
    "nothing",
    "number",
    "parse_json",
    "parse_yaml",
    "raise_faults",
    "read_json",
    "read_text",
    "read_yaml",
    "record",
    "show",
    "text",
    "where",
]
