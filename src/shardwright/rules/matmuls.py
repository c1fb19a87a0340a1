"""Matrix products, convolutions, attention."""

from __future__ import annotations

from ..ir.graph import ITEM_SIZE
from .dims import label_dims, marked, stretched, write_rule
from .notation import Rule, parse
from .registry import OpCall, fixed, letters, rule


@rule("linear")
def linear(call: OpCall) -> Rule:
    rows = " ".join(letters(len(call.shape) - 1, "m"))
    weight = call.inputs[1].shape
    out = "n" if len(weight) == 2 else ""
    extra = f", {out}&" if len(call.inputs) == 3 else ""
    return parse(f"{rows} k+ ~1, {out} k+ ~2{extra} -> {rows} {out}")


fixed("m k+ ~1, k+ n ~2 -> m n", "mm")
fixed("b m k+ ~1, b k+ n ~2 -> b m n", "bmm")
fixed("m k+ ~1, k+ ~2 -> m", "mv")
fixed("k+ ~1, k+ ~2 -> ", "dot")


@rule("addmm", "addmv", "addbmm", "baddbmm", "addr")
def added(call: OpCall) -> Rule:
    """A product and something added once to it, which broadcasts."""
    left, right, out = {
        "addmm": ("m k+", "k+ n", "m n"),
        "addmv": ("m k+", "k+", "m"),
        "addbmm": ("b+ m k+", "b+ k+ n", "m n"),
        "baddbmm": ("b m k+", "b k+ n", "b m n"),
        "addr": ("m", "n", "m n"),
    }[call.op.target.split(".")[1]]
    added = " ".join(stretched(call.shape, call.outputs[0].shape, out.split()))
    return parse(f"{added}&, {left}, {right} -> {out}")


fixed("m ~1, n ~2 -> m n", "outer", "ger")
fixed("* k+ ~1, * k+ ~2 -> *", "linalg_vecdot")


@rule("inner")
def inner(call: OpCall) -> Rule | None:
    if not all(value.shape for value in call.inputs):
        return None
    left, right = letters(len(call.shape) - 1, "m"), letters(len(call.inputs[1].shape) - 1, "n")
    return write_rule([[*left, "k+"], [*right, "k+"]], [[*left, *right]], [1, 2])


@rule("tensordot")
def tensordot(call: OpCall) -> Rule:
    a, b = call.inputs[0].shape, call.inputs[1].shape
    contracted = [dim % len(a) for dim in call.op.argument("dims_self", ())]
    other = [dim % len(b) for dim in call.op.argument("dims_other", ())]
    left, right = label_dims(a, "m"), label_dims(b, "n")
    for at, (i, j) in enumerate(zip(contracted, other, strict=True)):
        name = marked(f"k{at}" if left[i] != "1" else "1", "+")
        left[i] = right[j] = name
    result = [
        *(n for at, n in enumerate(left) if at not in contracted),
        *(n for at, n in enumerate(right) if at not in other),
    ]
    return write_rule([left, right], [result], [1, 2])


@rule("bilinear")
def bilinear(call: OpCall) -> Rule:
    rows = label_dims(call.shape[:-1], "m")
    bias = [["n&"]] * (len(call.inputs) - 3)
    return write_rule([[*rows, "i+"], [*rows, "j+"], ["n", "i+", "j+"], *bias], [[*rows, "n"]])


@rule("aten.cdist.default", "aten._cdist_forward.default")
def cdist(call: OpCall) -> Rule:
    out = call.outputs[0].shape
    rows = label_dims(out[:-2], "b")
    lead = [stretched(value.shape[:-2], out[:-2], rows) for value in call.inputs]
    return write_rule([[*lead[0], "m", "k^"], [*lead[1], "n", "k^"]], [[*rows, "m", "n"]])


@rule("_grouped_mm", "transformers.grouped_mm_fallback.default")
def grouped(call: OpCall) -> Rule | None:
    """Runs of rows, each with its own matrix: the runs are where they are, both other sides are free.

    Torch's kernel wants rows of whole 16 bytes, so that sides are split in such units.
    """
    if len(call.shape) != 2 or len(call.inputs) != 3 or len(call.inputs[1].shape) != 3:
        return None
    runs, k, n = call.inputs[1].shape
    unit = 16 // ITEM_SIZE.get(call.inputs[0].dtype, 4)
    into, out = (f"({name} {unit})" if size % unit == 0 else str(size) for name, size in (("k+", k), ("n", n)))
    rule = write_rule(
        [[str(call.shape[0]), into], [str(runs), into, out], [str(runs)]], [[str(call.shape[0]), out]], [1, 2]
    )
    return rule.with_sizes({"k": k // unit, "n": n // unit})


@rule("matmul")
def matmul(call: OpCall) -> Rule:
    """numpy's rules: leading dims broadcast, vectors have no row or column."""
    a, b = call.inputs[0].shape, call.inputs[1].shape
    out = call.outputs[0].shape
    batch = len(out) - (len(a) > 1) - (len(b) > 1)
    names = letters(batch, "b")

    def lead(shape: tuple[int, ...]) -> list[str]:
        leading = shape[:-2] if len(shape) > 1 else ()
        shown = names[batch - len(leading) :]
        return [n if s != 1 else "1" for n, s in zip(shown, leading, strict=True)]

    left = [*lead(a), *(["m"] if len(a) > 1 else []), "k+"]
    right = [*lead(b), "k+", *(["n"] if len(b) > 1 else [])]
    result = [n if s != 1 else "1" for n, s in zip(names, out[:batch], strict=True)]
    result += (["m"] if len(a) > 1 else []) + (["n"] if len(b) > 1 else [])
    return parse(f"{' '.join(left)} ~1, {' '.join(right)} ~2 -> {' '.join(result)}")


@rule("einsum")
def einsum(call: OpCall) -> Rule:
    """As the equation says. A label that one tensor has twice is a diagonal: it stays whole."""
    equation = str(call.op.argument("equation", "")).replace(" ", "")
    if "->" not in equation:
        used = equation.replace(",", "").replace(".", "")
        once = "".join(sorted(name for name in set(used) if used.count(name) == 1))
        equation += f"->{'...' if '...' in equation else ''}{once}"
    left, right = equation.split("->")
    shapes = [value.shape for value in call.inputs]
    dots = [len(shape) - len(term.replace("...", "")) for term, shape in zip(left.split(","), shapes, strict=True)]
    lead = max(dots)
    inputs = [_labels(term, range(lead - own, lead)) for term, own in zip(left.split(","), dots, strict=True)]
    result = _labels(right, range(lead))
    stuck = {name for names in inputs for name in names if names.count(name) > 1}

    def shown(name: str, size: int) -> str:
        return "1" if size == 1 else f"{name}^" if name in stuck else name if name in result else f"{name}+"

    terms = [
        [shown(n, s) for n, s in zip(names, shape, strict=True)] for names, shape in zip(inputs, shapes, strict=True)
    ]
    out = [name if size != 1 else "1" for name, size in zip(result, call.outputs[0].shape, strict=True)]
    return write_rule(terms, [out], [at + 1 for at in range(len(terms))])


def _labels(term: str, lead: range) -> list[str]:
    """The labels of one tensor of an equation, dots written out."""
    before, dots, after = term.partition("...")
    return [*before, *(f"dot{at}" for at in lead if dots), *after]


@rule("convolution", "aten.conv1d.default", "aten.conv2d.default", "aten.conv3d.default", "aten.conv_transpose2d.input",
      "aten.conv_transpose1d.default", "aten.conv_transpose3d.input", "aten.conv1d.padding", "aten.conv2d.padding",
      "aten.conv3d.padding")  # fmt: skip
def convolution(call: OpCall) -> Rule | None:
    """Batch and channels; space would need halos and stays whole."""
    x, w, y = call.inputs[0].shape, call.inputs[1].shape, call.outputs[0].shape
    n = "n" if len(x) == len(w) else ""
    x, y = (x, y) if n else ((1, *x), (1, *y))
    groups = call.op.argument("groups", 1)
    transposed = "transpose" in call.op.target or bool(call.op.argument("transposed", False))
    inside = " ".join(str(size) for size in x[2:])
    outside = " ".join(str(size) for size in y[2:])
    window = " ".join(str(size) for size in w[2:])
    bias = "" if len(call.inputs) < 3 else ", o&" if groups == 1 else ", (g o)&"
    if groups == 1:
        weight = "c+ o" if transposed else "o c+"
        return parse(f"{n} c+ {inside} ~1, {weight} {window} ~2{bias} -> {n} o {outside}")
    weight = "(g c+) o" if transposed else "(g o) c+"
    rule = parse(f"{n} (g c+) {inside} ~1, {weight} {window} ~2{bias} -> {n} (g o) {outside}")
    return rule.with_sizes({"g": groups}).with_local({"groups": ("g",)})


@rule("scaled_dot_product_attention")
def attention(call: OpCall) -> Rule | None:
    """Batch and heads. Queries may be split too if nothing depends on their place.

    With grouped heads the queries' heads are (g r) and those of keys and values g.
    """
    q, k, v = (value.shape for value in call.inputs[:3])
    if len(q) < 3 or not q[:-3] == k[:-3] == v[:-3] or not len(q) == len(k) == len(v):
        return None  # leading dims that broadcast
    lead = letters(len(q) - 3, "b")
    query_heads, key_heads = q[-3], k[-3]
    grouped = query_heads != key_heads
    heads = "(g r)" if grouped else "g"
    causal = bool(call.op.argument("is_causal", False))
    s = "s^" if causal else "s"
    row = " ".join(lead)
    terms = [f"{row} {heads} {s} e^", f"{row} g t^ e^", f"{row} g t^ d^"]
    mask = call.tensor("attn_mask")
    if mask is not None:
        terms.append(_mask_term(mask.shape, call.outputs[0].shape, lead, heads, s))
    rule = parse(f"{', '.join(terms)} -> {row} {heads} {s} d^")
    return rule.with_sizes({"g": key_heads, "r": query_heads // key_heads} if grouped else {})


def _mask_term(shape: tuple[int, ...], out: tuple[int, ...], lead: list[str], heads: str, s: str) -> str:
    """A mask broadcasts to [..., heads, queries, keys]."""
    full = [*lead, heads, s, "t^"]
    sizes = [*out[:-1], None]
    shown, own = full[len(full) - len(shape) :], sizes[len(full) - len(shape) :]
    return " ".join(
        name if want is None or size == want else "1" for name, size, want in zip(shown, shape, own, strict=True)
    )
