"""Matrix products, convolutions, attention."""

from __future__ import annotations

from .notation import Rule, parse
from .registry import Call, fixed, letters, rule


@rule("linear")
def linear(call: Call) -> Rule:
    rows = " ".join(letters(len(call.shape) - 1, "m"))
    weight = call.inputs[1].shape
    out = "n" if len(weight) == 2 else ""
    extra = f", {out}&" if len(call.inputs) == 3 else ""
    return parse(f"{rows} k+ ~1, {out} k+ ~2{extra} -> {rows} {out}")


fixed("m k+ ~1, k+ n ~2 -> m n", "mm")
fixed("b m k+ ~1, b k+ n ~2 -> b m n", "bmm")
fixed("m k+ ~1, k+ ~2 -> m", "mv")
fixed("k+ ~1, k+ ~2 -> ", "dot")


@rule("addmm")
def addmm(call: Call) -> Rule:
    bias = call.shape
    term = "n&" if len(bias) == 1 else "m n&"
    return parse(f"{term}, m k+, k+ n -> m n")


@rule("baddbmm")
def baddbmm(call: Call) -> Rule:
    return parse("?, b m k+, b k+ n -> b m n") if 1 in call.shape else parse("b m n&, b m k+, b k+ n -> b m n")


@rule("matmul")
def matmul(call: Call) -> Rule:
    """numpy's rules: leading dims broadcast, vectors have no row or column."""
    a, b = call.inputs[0].shape, call.inputs[1].shape
    out = call.outputs[0].shape
    batch = len(out) - (len(a) > 1) - (len(b) > 1)
    names = letters(batch, "b")

    def lead(shape: tuple[int, ...]) -> list[str]:
        held = shape[:-2] if len(shape) > 1 else ()
        shown = names[batch - len(held) :]
        return [n if s != 1 else "1" for n, s in zip(shown, held, strict=True)]

    left = [*lead(a), *(["m"] if len(a) > 1 else []), "k+"]
    right = [*lead(b), "k+", *(["n"] if len(b) > 1 else [])]
    result = [n if s != 1 else "1" for n, s in zip(names, out[:batch], strict=True)]
    result += (["m"] if len(a) > 1 else []) + (["n"] if len(b) > 1 else [])
    return parse(f"{' '.join(left)} ~1, {' '.join(right)} ~2 -> {' '.join(result)}")


@rule("einsum")
def einsum(call: Call) -> Rule | None:
    text = str(call.op.argument("equation", "")).replace(" ", "")
    if "." in text or "->" not in text:
        return None
    left, right = text.split("->")
    terms = [
        " ".join(label if label in right else f"{label}+" for label in term) + f" ~{at + 1}"
        for at, term in enumerate(left.split(","))
    ]
    if any(len(set(term)) != len(term) for term in left.split(",")):
        return None
    return parse(f"{', '.join(terms)} -> {' '.join(right)}")


@rule("convolution", "aten.conv1d.default", "aten.conv2d.default", "aten.conv3d.default", "aten.conv_transpose2d.input",
      "aten.conv_transpose1d.default", "aten.conv_transpose3d.input")  # fmt: skip
def convolution(call: Call) -> Rule | None:
    """Batch and channels; space would need halos and stays whole."""
    x, w, y = call.inputs[0].shape, call.inputs[1].shape, call.outputs[0].shape
    space = len(w) - 2
    if len(x) != len(w):
        return None
    groups = call.op.argument("groups", 1)
    transposed = "transpose" in call.op.target or bool(call.op.argument("transposed", False))
    inside = " ".join(str(size) for size in x[2:])
    outside = " ".join(str(size) for size in y[2:])
    window = " ".join(str(size) for size in w[2:])
    bias = "" if len(call.inputs) < 3 else ", o&" if groups == 1 else ", (g o)&"
    assert space >= 1
    if groups == 1:
        weight = "c+ o" if transposed else "o c+"
        return parse(f"n c+ {inside} ~1, {weight} {window} ~2{bias} -> n o {outside}")
    weight = "(g c+) o" if transposed else "(g o) c+"
    return parse(f"n (g c+) {inside} ~1, {weight} {window} ~2{bias} -> n (g o) {outside}").with_sizes({"g": groups})


@rule("scaled_dot_product_attention")
def attention(call: Call) -> Rule | None:
    """Batch and heads. Queries may be split too if nothing depends on their place.

    With grouped heads the queries' heads are (g r) and those of keys and values g.
    """
    q, k = call.inputs[0].shape, call.inputs[1].shape
    lead = letters(len(q) - 3, "b")
    if len(q) < 3:
        return None
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
    shown, held = full[len(full) - len(shape) :], sizes[len(full) - len(shape) :]
    return " ".join(
        name if want is None or size == want else "1" for name, size, want in zip(shown, shape, held, strict=True)
    )
