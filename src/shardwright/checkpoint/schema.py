"""What the JSON files of a checkpoint should have. Digests tell damage; they don't tell who wrote the files."""

from __future__ import annotations

from ..formats import Faults, either, integer, listing, literal, mapping, nothing, number, record, text
from .encoding import encoded

LARGEST = 2**30  # bytes of an index or a state: some of a model of a trillion parameters on thousands of ranks
LARGEST_DIM = 2**48
MOST_DIMS = 32

_file = text(r"[^/\\]*[^/\\.][^/\\]*", longest=255, described="the name of a file in its folder")
_size = integer(0, 2**62)
_sizes = listing(integer(0, LARGEST_DIM), most=MOST_DIMS)
_name = text(longest=10_000)

MANIFEST_SCHEMA = record(
    {
        "version": integer(1), "step": either(integer(), nothing()), "metrics": mapping(number(finite=False)),
        "world": integer(1, 2**30), "when": text(longest=100),
        "files": mapping(record({"bytes": _size, "blake2b": text(r"[0-9a-f]{64}", described="a digest")}), _file),
    },
    {"format": text()},
)  # fmt: skip

CHUNK_FIELDS = ("offsets", "sizes", "file", "start")


def _chunk(value: object) -> Faults:
    """A chunk is a list of four different things, which is short in a file of millions."""
    if not isinstance(value, list) or len(value) != len(CHUNK_FIELDS):
        return [((), "should be a list of offsets, sizes, file and start")]
    schemas = (_sizes, _sizes, _file, _size)
    return [
        ((name, *route), message)
        for name, schema, part in zip(CHUNK_FIELDS, schemas, value, strict=True)
        for route, message in schema(part)
    ]


INDEX_SCHEMA = record(
    {"tensors": mapping(record({"dtype": text(longest=20), "shape": _sizes, "chunks": listing(_chunk)}), _name)}
)

HF_INDEX_SCHEMA = record({"weight_map": mapping(_file, _name)}, others=True)

HEADER_SCHEMA = mapping(
    record({"dtype": text(longest=20), "shape": _sizes, "data_offsets": listing(_size, least=2, most=2)}), _name
)
METADATA_SCHEMA = mapping(text(longest=10_000_000), _name)



def _group(value: object) -> Faults:
    """A param group: the names of its parameters, and its options."""
    if not isinstance(value, dict):
        return [((), "should be an object")]
    options = {key: item for key, item in value.items() if key != "params"}
    return [*record({"params": listing(_name)}, others=True)(value), *encoded(options)]


_optimizer = record(
    {
        "kind": text(), "groups": listing(_group),
        "state": mapping(mapping(encoded), _name),
    },
)  # fmt: skip
STATE_SCHEMA = record(
    {
        "optimizers": listing(_optimizer), "schedulers": listing(encoded), "extra": mapping(encoded), "data": encoded,
        "tied": mapping(_name, _name),
        "random": mapping(record({"seed": either(integer(), literal(None)), "step": integer(0)})),
        "plans": mapping(text(longest=2**24)), "versions": mapping(text()),
    },
    others=True,
)  # fmt: skip
