"""Faults of rules: a split that would not give the whole is taken for one that does."""

from .fault import Fault


def drawn(target: str) -> str:
    """The test that draws arguments of an op, splits it in every way that its rule allows, and recombines."""
    name = target if target.count(".") > 1 else f"aten.{target}.default"
    return f"rules/test_properties.py::test_every_split_that_the_rule_allows_recombines_to_the_unsplit_result[{name}]"


WRITTEN = "rules/test_written.py"

RULES = (
    Fault(
        "the bias of a product is added on every rank",
        "ops/matmuls.py",
        'extra = f", {out}&" if',
        'extra = f", {out}" if',
        drawn("linear"),
    ),
    Fault(
        "a product is the other way round",
        "ops/matmuls.py",
        '"mm", rule="m k+ ~1, k+ n ~2 -> m n"',
        '"mm", rule="m k+ ~1, k+ n ~2 -> n m"',
        WRITTEN,
    ),
    Fault(
        "what is added to a product is added on every rank",
        "ops/matmuls.py",
        'parse(f"{added}&, {left}, {right} -> {out}")',
        'parse(f"{added}, {left}, {right} -> {out}")',
        drawn("addmm"),
    ),
    Fault(
        "distances may be split along what they sum",
        "ops/matmuls.py",
        '[*lead[0], "m", "k^"], [*lead[1], "n", "k^"]',
        '[*lead[0], "m", "k+"], [*lead[1], "n", "k+"]',
        drawn("cdist"),
    ),
    Fault(
        "a diagonal of an einsum may be split",
        "ops/matmuls.py",
        'f"{name}^" if name in stuck else',
        "",
        WRITTEN,
    ),
    Fault(
        "groups keep their number",
        "ops/convolutions.py",
        '.with_sizes({"g": groups}).with_local({"groups": ("g",)})',
        '.with_sizes({"g": groups})',
        "rules/test_families.py",
    ),
    Fault(
        "causal attention does not know the places of its queries",
        "ops/attention.py",
        'if not keys and not (queries and rule and "s" in rule.algorithms):',
        "if not keys:",
        "rules/test_families.py::test_every_split_of_the_family_recombines_to_the_unsplit_result[attention]",
    ),
    Fault(
        "attention may split its keys",
        "ops/attention.py",
        't = "t^" if whole or len(q) != 4 else "t=ring@s"',
        't = "t"',
        drawn("scaled_dot_product_attention"),
    ),
    Fault(
        "attention with a window may split its queries",
        "ops/attention.py",
        's = "s=queries" if causal or windowed else "s"',
        's = "s=queries" if causal else "s"',
        WRITTEN,
    ),
    Fault(
        "padding is alike for all samples",
        "ops/attention.py",
        "row if data.shape[0] == q[0] else '1'",
        "'1'",
        drawn("shardwright.attention.default"),
    ),
    Fault(
        "softmax may be split along its dim",
        "ops/reductions.py",
        'through(call, {call.dim("dim", -1)}, linear="cumsum." in',
        'through(call, set(), linear="cumsum." in',
        "rules/test_families.py",
    ),
    Fault(
        "a sort may be split along the dim before",
        "ops/reductions.py",
        'through(call, {call.dim("dim", -1)}, linear="cumsum." in',
        'through(call, {call.dim("dim", -1) - 1}, linear="cumsum." in',
        drawn("aten.sort.default"),
    ),
    Fault(
        "the largest of sums",
        "ops/reductions.py",
        'return _reduced(call, "+max" if "max" in call.op.target else "+min", False)',
        'return _reduced(call, "+", False)',
        drawn("aten.amax.default"),
    ),
    Fault(
        "the least for the largest",
        "ops/reductions.py",
        '"+max" if "max" in',
        '"+max" if "min" in',
        drawn("aten.amax.default"),
    ),
    Fault(
        "a norm may be split along what it averages",
        "ops/norms.py",
        "names[len(names) - width :] = [blocked(name) for",
        "names[len(names) - width :] = [name for",
        drawn("layer_norm"),
    ),
    Fault(
        "groups of channels are cut",
        "ops/norms.py",
        'else f"(g {inside})"',
        'else f"({inside} g)"',
        drawn("group_norm"),
    ),
    Fault(
        "a looked up dim is split",
        "ops/lookups.py",
        "source[dim] = str(call.shape[dim])",
        "pass",
        drawn("index_select"),
    ),
    Fault(
        "x * x is linear",
        "ops/arithmetic.py",
        "[1, 2][: len(call.inputs)]",
        "[1, 1][: len(call.inputs)]",
        drawn("aten.mul.Tensor"),
    ),
    Fault(
        "x / y is linear in y",
        "ops/arithmetic.py",
        "[1, None][: len(call.inputs)]",
        "[1, 1][: len(call.inputs)]",
        drawn("aten.div.Tensor"),
    ),
    Fault(
        "repeated elements lie apart",
        "ops/moves.py",
        'else f"({names[dim]} {repeats})"',
        'else f"({repeats} {names[dim]})"',
        drawn("aten.repeat_interleave.self_int"),
    ),
    Fault(
        "a triangle may be split",
        "ops/moves.py",
        "range(len(call.shape) - 2, len(call.shape)), linear=True",
        "range(len(call.shape) - 1, len(call.shape)), linear=True",
        drawn("tril"),
    ),
    Fault(
        "the index of a gather reads a split dim",
        "ops/lookups.py",
        "name if at != dim and own == size else str(size)",
        "name if own == size else str(size)",
        WRITTEN,
    ),
    Fault(
        "x + 1 is linear",
        "ops/arithmetic.py",
        "return pointwise(call, [1, 1] if both else [None])",
        "return pointwise(call, [1, 1] if both else [1])",
        WRITTEN,
    ),
    Fault(
        "padding with a number is linear",
        "ops/moves.py",
        'linear=not call.op.argument("value", 0))',
        "linear=True)",
        WRITTEN,
    ),
    Fault(
        "a dim before the padded one stays whole",
        "ops/moves.py",
        "len(call.shape) - 1 - at // 2 for",
        "len(call.shape) - 2 - at // 2 for",
        WRITTEN,
    ),
    Fault(
        "a stack is along another dim",
        "ops/moves.py",
        "result = [*names[:dim], str(len(call.inputs)), *names[dim:]]",
        "result = [*names, str(len(call.inputs))]",
        WRITTEN,
    ),
)
