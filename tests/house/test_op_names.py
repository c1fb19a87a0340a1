"""What is known about an op stands in `ops/`. The few other files that name aten ops have a reason each."""

from __future__ import annotations

import ast
from pathlib import Path

import torch

from .source import SRC, files, nodes

TRACING = "looks at what torch traces, before it is an op of a graph"
REWRITING = "writes a traced call as other ops"
PARAMETERS = "runs what users do with sharded parameters, outside of a program"

OPTION = "the option that chooses the statistics of batch norms has the name of the op"
ALLOWED = {
    "parallelize.py": (1, OPTION),
    "plan/file.py": (1, OPTION),
    "plan/plan.py": (1, OPTION),
    "plan/schema.py": (1, OPTION),
    "report/plans.py": (1, OPTION),
    "train/setup.py": (1, OPTION),
    "capture/building/aliases.py": (3, "a write that autograd does not see is a difference and a sum"),
    "capture/building/convert.py": (15, TRACING),
    "capture/building/finish.py": (2, REWRITING),
    "capture/building/in_place_ops.py": (11, "finds the functional twin of an op that writes"),
    "capture/building/leaves.py": (7, REWRITING),
    "capture/building/masked_selection.py": (42, REWRITING),
    "capture/building/schema.py": (1, "an argument of torch has the name of an op"),
    "capture/building/strided_access.py": (1, REWRITING),
    "capture/masks/grouped_heads.py": (7, "heads that are repeated are read before they are"),
    "capture/masks/known_values.py": (1, "an expand takes no memory, however large it is"),
    "capture/masks/mask_data.py": (4, REWRITING),
    "capture/masks/packed_positions.py": (4, "finds ids that count where positions start anew"),
    "capture/masks/meanings.py": (7, "what ops make of positions"),
    "capture/masks/places.py": (1, "what ops make of positions"),
    "capture/failure.py": (2, "reads torch's error messages"),
    "capture/tracing/constant_values.py": (14, TRACING),
    "capture/tracing/foreign_parameters.py": (3, TRACING),
    "capture/tracing/python_numbers.py": (35, REWRITING),
    "capture/tracing/sizes.py": (7, TRACING),
    "capture/user_calls/opaque.py": (1, "an argument that is named after batch norms"),
    "compile/call_mapping.py": (1, "finds the input behind a detach"),
    "cost/time.py": (1, "a library's name, not an op"),
    "cost/work.py": (1, "a library's name, not an op"),
    "emit/calls.py": (1, "a library's name, not an op"),
    "emit/layers.py": (1, "a method of the runtime has the name of an op"),
    "emit/meaning.py": (2, "a library's name, not an op"),
    "emit/parse.py": (5, "reads operators of Python back, and nothing of that comes from the printers"),
    "lower/label_counts.py": (1, "a library's name, not an op"),
    "lower/overlap.py": (1, "joins linears with the reshard before them"),
    "lower/tidy.py": (7, "folds biases, and turns views into reshapes"),
    "plan/joint/microbatch_tables.py": (1, "statistics of a batch differ between microbatches"),
    "ir/recompute.py": (1, "a batch norm writes its statistics twice if it is recomputed"),
    "plan/stages.py": (1, "a library's name, not an op"),
    "probe/discover.py": (7, "ops whose kernels don't check what they are given"),
    "probe/splits.py": (2, "ops whose results have no values"),
    "rehearse/arguments.py": (7, "arguments that are sizes and have to shrink"),
    "rehearse/draws.py": (8, "inputs that are indices"),
    "report/communication.py": (2, "views are not worth a line"),
    "runtime/__init__.py": (2, "algorithms of the runtime have the names of their ops"),
    "runtime/algorithms/random.py": (1, "calls torch's own attention"),
    "runtime/collectives/pending.py": (1, PARAMETERS),
    "runtime/faults/nonfinite.py": (4, "ops whose results are not looked at"),
    "runtime/model/methods.py": (14, PARAMETERS),
    "runtime/model/shared_outputs.py": (1, PARAMETERS),
    "runtime/parameters/local_ops.py": (47, PARAMETERS),
    "runtime/parameters/outside.py": (13, PARAMETERS),
    "runtime/parameters/replaced.py": (1, PARAMETERS),
    "runtime/parameters/stage_numbers.py": (5, PARAMETERS),
    "train/feed.py": (1, "an argument of torch has the name of an op"),
    "verify/rebind.py": (1, "finds casts"),
}
"""Files that name ops, how many names they may have, and why."""


def op_names(root: Path) -> dict[str, int]:
    """How many names of aten ops stand as strings in each file outside of `ops/`, docstrings left out."""
    every = (name.partition("::") for name in torch._C._dispatch_get_all_op_names())
    known = {name.split(".")[0] for library, _, name in every if library == "aten"}
    counts: dict[str, int] = {}
    for path in files(root):
        name = str(path.relative_to(root))
        docs = {
            id(node.body[0].value)
            for node in nodes(path)
            if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        strings = [
            node.value
            for node in nodes(path)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs
        ]
        count = sum(_is_op(word, known) for text in strings for word in text.split())
        if count and not name.startswith("ops/"):
            counts[name] = count
    return counts


def _is_op(word: str, known: set[str]) -> bool:
    base = word.removeprefix("aten.").removeprefix("aten::").removeprefix("torch.ops.aten.").split(".")[0]
    return word.startswith(("aten.", "aten::", "torch.ops.aten")) or ("_" in base and base in known)


def test_ops_are_named_where_they_are_defined_and_in_few_other_places():
    more = {name: count for name, count in op_names(SRC).items() if count > ALLOWED.get(name, (0, ""))[0]}
    assert more == {}, "what these files know about ops belongs into a definition in ops/"


def test_what_is_allowed_is_still_there():
    counts = op_names(SRC)
    assert {name: counts.get(name, 0) for name, (count, _) in ALLOWED.items()} == {
        name: count for name, (count, _) in ALLOWED.items()
    }


def test_a_name_outside_of_ops_is_found(tmp_path):
    (tmp_path / "cost.py").write_text('"""layer_norm"""\nPASSES = {"layer_norm": 2, "gelu": 1, "aten.mm.default": 3}\n')
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "norms.py").write_text('define("layer_norm")\n')
    assert op_names(tmp_path) == {"cost.py": 2}
