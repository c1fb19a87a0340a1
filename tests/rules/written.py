"""Calls with the rule that each gets, in the notation: a page to read what the rules say, family by family.

None is a call that has no rule: it runs whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwright.ops.attention import STRUCTURED
from tests.rules.drawn import Arguments


def real(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


def ids(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(high))


def truths(*shape: int) -> Tensor:
    return ids(2, *shape).bool()


def attended(query: Tensor, key: Tensor, mask: Tensor | None = None, *, causal: bool = False) -> Arguments:
    grouped = query.dim() == 4 and query.shape[1] != key.shape[1]
    return {
        "query": query, "key": key, "value": key, "attn_mask": mask, "dropout_p": 0.0, "is_causal": causal,
        "scale": None, "enable_gqa": grouped,
    }  # fmt: skip


KEYS_AND_QUERIES = {"query": real(2, 4, 3, 5), "key": real(2, 2, 6, 5), "value": real(2, 2, 6, 5)}
X = real(6, 4, 6)
RUNS = torch.tensor([2, 5, 8], dtype=torch.int32)
COLUMN = torch.arange(4).view(1, 4, 1)
MOMENTS = {"momentum": 0.1, "eps": 1e-5, "cudnn_enabled": False}
FRESH = {"running_mean": None, "running_var": None, **MOMENTS}
KEPT = {"running_mean": real(4), "running_var": real(4).abs(), **MOMENTS}
NO_BIAS = {"weight": None, "bias": None}
UNPADDED = {"stride": [1], "padding": [0], "dilation": [1], "output_padding": [0], "groups": 1, "bias": None}

Written = dict[str, tuple[str, Arguments, str | None]]

PRODUCTS: Written = {
    "linear, no rows": ("linear", {"input": real(4), "weight": real(6, 4), "bias": real(6)}, "k+ ~1, n k+ ~2, n& -> n"),
    "linear to one number": ("linear", {"input": real(6, 4), "weight": real(4), "bias": None}, "ma k+ ~1, k+ ~2 -> ma"),
    "addmm, a row": ("addmm", {"self": real(6), "mat1": real(4, 6), "mat2": real(6, 6)}, "n&, m k+, k+ n -> m n"),
    "mm of square matrices": (  # where every layout fits the sizes
        "mm", {"self": real(6, 6), "mat2": real(6, 6)}, "m k+ ~1, k+ n ~2 -> m n",
    ),
    "addbmm": (
        "addbmm", {"self": real(4, 1), "batch1": real(6, 4, 6), "batch2": real(6, 6, 6)},
        "m 1&, b+ m k+, b+ k+ n -> m n",
    ),
    "inner": ("inner", {"self": real(6, 4), "other": real(2, 4)}, "ma k+ ~1, na k+ ~2 -> ma na"),
    "tensordot": (
        "tensordot", {"self": real(6, 1, 4), "other": real(4, 1, 6), "dims_self": [1, -1], "dims_other": [-2, 0]},
        "ma 1 k1+ ~1, k1+ 1 nc ~2 -> ma nc",
    ),
    "bilinear": (
        "bilinear", {"input1": real(6, 4), "input2": real(6, 2), "weight": real(6, 4, 2), "bias": real(6)},
        "ma i+, ma j+, n i+ j+, n& -> ma n",
    ),
    "bilinear, no bias": (
        "bilinear", {"input1": real(6, 4), "input2": real(6, 2), "weight": real(6, 4, 2), "bias": None},
        "ma i+, ma j+, n i+ j+ -> ma n",
    ),
    "cdist": ("cdist", {"x1": real(6, 1, 4, 3), "x2": real(2, 6, 3), "p": 2.0}, "ba 1 m k^, bb n k^ -> ba bb m n"),
    "grouped rows": (
        "_grouped_mm", {"self": real(8, 8).float(), "mat2": real(3, 8, 16).float(), "offs": RUNS},
        "8 (k+ 4) ~1, 3 (k+ 4) (n 4) ~2, 3 -> 8 (n 4)",
    ),
    "matmul, broadcast": (
        "matmul", {"self": real(6, 1, 4, 6), "other": real(3, 6, 8)}, "ba 1 m k+ ~1, bb k+ n ~2 -> ba bb m n",
    ),
    "matmul, vector left": ("matmul", {"self": real(6), "other": real(4, 6, 8)}, "k+ ~1, ba k+ n ~2 -> ba n"),
    "matmul, vector right": ("matmul", {"self": real(4, 6, 8), "other": real(8)}, "ba m k+ ~1, k+ ~2 -> ba m"),
    "matmul, two vectors": ("matmul", {"self": real(6), "other": real(6)}, "k+ ~1, k+ ~2 ->"),
    "einsum, no arrow": (
        "einsum", {"equation": "ij, kj", "tensors": [real(4, 6), real(2, 6)]}, "i j+ ~1, k j+ ~2 -> i k",
    ),
    "einsum, dots and no arrow": (
        "einsum", {"equation": "...j,jk", "tensors": [real(4, 2, 6), real(6, 2)]},
        "dot0 dot1 j+ ~1, j+ k ~2 -> dot0 dot1 k",
    ),
    "einsum, a diagonal": (
        "einsum", {"equation": "iij,j->i", "tensors": [real(4, 4, 6), real(6)]}, "i^ i^ j+ ~1, j+ ~2 -> i",
    ),
    "einsum, fewer dots": (
        "einsum", {"equation": "b...k,...k->b...", "tensors": [real(6, 2, 4, 3), real(4, 3)]},
        "b dot0 dot1 k+ ~1, dot1 k+ ~2 -> b dot0 dot1",
    ),
    "einsum, a dim of one": (
        "einsum", {"equation": "ab,bc->ac", "tensors": [real(6, 1), real(1, 4)]}, "a 1 ~1, 1 c ~2 -> a c",
    ),
    "conv": (
        "conv2d", {"input": real(2, 4, 5, 5), "weight": real(6, 4, 3, 3), "bias": real(6)},
        "n c+ 5 5 ~1, o c+ 3 3 ~2, o& -> n o 3 3",
    ),
    "conv, one picture": (
        "conv2d", {"input": real(4, 5, 5), "weight": real(6, 4, 3, 3), "bias": None}, "c+ 5 5 ~1, o c+ 3 3 ~2 -> o 3 3",
    ),
    "conv, groups": (
        "conv2d", {"input": real(2, 4, 5, 5), "weight": real(6, 2, 3, 3), "bias": real(6), "groups": 2},
        "n (g c+) 5 5 ~1, (g o) c+ 3 3 ~2, (g o)& -> n (g o) 3 3",
    ),
    "conv, transposed groups": (
        "conv_transpose1d", {"input": real(2, 4, 5), "weight": real(4, 3, 3), "bias": None, "groups": 2},
        "n (g c+) 5 ~1, (g c+) o 3 ~2 -> n (g o) 7",
    ),
    "conv, transposed by a flag": (
        "convolution", {"input": real(2, 4, 5), "weight": real(4, 6, 3), "transposed": True, **UNPADDED},
        "n c+ 5 ~1, c+ o 3 ~2 -> n o 7",
    ),
    "attention": (
        "scaled_dot_product_attention", attended(real(2, 4, 3, 5), real(2, 4, 3, 5)),
        "ba g s e^, ba g t=ring@s e^, ba g t=ring@s d^ -> ba g s d^",
    ),
    "attention, causal and grouped": (
        "scaled_dot_product_attention", attended(real(2, 4, 3, 5), real(2, 2, 3, 5), causal=True),
        "ba (g r) s=queries e^, ba g t=ring@s e^, ba g t=ring@s d^ -> ba (g r) s=queries d^",
    ),
    "attention, three dims": (
        "scaled_dot_product_attention", attended(real(4, 3, 5), real(4, 2, 5)), "g s e^, g t^ e^, g t^ d^ -> g s d^",
    ),
    "attention, mask of all": (
        "scaled_dot_product_attention", attended(real(2, 4, 3, 5), real(2, 4, 6, 5), real(2, 4, 3, 6)),
        "ba g s e^, ba g t^ e^, ba g t^ d^, ba g s 6 -> ba g s d^",
    ),
    "attention, mask of rows": (
        "scaled_dot_product_attention", attended(real(2, 4, 3, 5), real(2, 4, 6, 5), real(2, 1, 1, 6)),
        "ba g s e^, ba g t^ e^, ba g t^ d^, ba 1 1 6 -> ba g s d^",
    ),
    "attention, mask of queries": (
        "scaled_dot_product_attention", attended(real(2, 4, 3, 5), real(2, 4, 3, 5), real(3, 3)),
        "ba g s e^, ba g t^ e^, ba g t^ d^, s 3 -> ba g s d^",
    ),
    "attention, rows that broadcast": (
        "scaled_dot_product_attention", attended(real(2, 4, 3, 5), real(1, 4, 3, 5)), None,
    ),
    "attention, a window": (
        STRUCTURED, {**KEYS_AND_QUERIES, "before": 1},
        "ba (g r) s=queries e^, ba g t=ring@s e^, ba g t=ring@s d^ -> ba (g r) s=queries d^",
    ),
    "attention, documents and padding": (
        STRUCTURED,
        {**KEYS_AND_QUERIES, "query_documents": ids(2, 2, 3), "key_documents": ids(2, 2, 6), "padding": truths(1, 6)},
        "ba (g r) s e^, ba g t=ring@s e^, ba g t=ring@s d^, ba s, ba 6, 1 6 -> ba (g r) s d^",
    ),
    "attention, no heads": ("scaled_dot_product_attention", attended(real(3, 5), real(3, 5)), None),
}  # fmt: skip

REDUCTIONS: Written = {
    "sum": ("sum.dim_IntList", {"self": X, "dim": [-1]}, "a b c+ ~1 -> a b"),
    "sum, kept": ("sum.dim_IntList", {"self": X, "dim": [0, 2], "keepdim": True}, "a+ b c+ ~1 -> 1 b 1"),
    "sum of all": ("sum.default", {"self": X}, "a+ b+ c+ ~1 ->"),
    "sum of whole numbers": ("sum.dim_IntList", {"self": ids(9, 4, 6), "dim": [0]}, "a+ b -> b"),
    "count of nonzeros": ("count_nonzero.dim_IntList", {"self": X, "dim": [1]}, "a b+ c -> a c"),
    "largest, with a gradient": ("amax", {"self": X, "dim": [1]}, "a b^ c -> a c"),
    "largest of whole numbers": ("amax", {"self": ids(9, 4, 6), "dim": [1]}, "a b+max -> a"),
    "least of whole numbers": ("amin", {"self": ids(9, 4, 6), "dim": [1]}, "a b+min -> a"),
    "largest of truths": ("amax", {"self": truths(4, 6), "dim": [1]}, "a b^ -> a"),
    "variance": ("var.correction", {"self": X, "dim": [2]}, "a b c^ -> a b"),
    "mode, last dim by default": ("mode", {"self": ids(3, 4, 6)}, "a b^ -> a, a"),
    "median, of a dim": ("median.dim", {"self": X, "dim": 1}, "a b^ c -> a c, a c"),
    "logsumexp": ("logsumexp.default", {"self": X, "dim": [1]}, "a b=classes c -> a c"),
    "logsumexp of two dims": ("logsumexp.default", {"self": X, "dim": [0, 1]}, "a^ b^ c -> c"),
    "softmax": ("softmax.int", {"self": X, "dim": 1}, "a b^ c -> a b c"),
    "cumsum": ("cumsum", {"self": X, "dim": 0}, "a^ b c ~1 -> a b c"),
    "cumprod": ("cumprod", {"self": X, "dim": 0}, "a^ b c -> a b c"),
    "topk": ("topk", {"self": X, "k": 2, "dim": 1}, "a b^ c -> a 2 c, a 2 c"),
    "sort, last dim by default": ("sort.default", {"self": X}, "a b c^ -> a b c, a b c"),
    "diff": ("diff", {"self": X, "dim": 1, "prepend": real(6, 2, 6)}, "a 4 c ~1, a 2 c ~1 -> a 5 c"),
    "trapezoid, last dim by default": ("trapezoid.dx", {"y": X}, "a b c^ ~1 -> a b"),
    "trapezoid": ("trapezoid.dx", {"y": X, "dim": 0}, "a^ b c ~1 -> b c"),
}  # fmt: skip

NORMS: Written = {
    "layer norm of two dims": (
        "layer_norm", {"input": X, "normalized_shape": [4, 6], "weight": real(4, 6), "bias": real(4, 6)},
        "a b^ c^, b^ c^, b^ c^ -> a b^ c^",
    ),
    "layer norm with its statistics": (
        "native_layer_norm", {"input": X, "normalized_shape": [6], "weight": real(6), "bias": None, "eps": 1e-05},
        "a b c^, c^ -> a b c^, a b 1, a b 1",
    ),
    "group norm": (
        "group_norm", {"input": real(6, 4, 5), "num_groups": 2, "weight": real(4), "bias": real(4)},
        "a (g 2) c^, (g 2), (g 2) -> a (g 2) c^",
    ),
    "group norm, one group": ("group_norm", {"input": real(6, 4, 5), "num_groups": 1, **NO_BIAS}, "a 4 c^ -> a 4 c^"),
    "group norm, a group a channel": (
        "group_norm", {"input": real(6, 4, 5), "num_groups": 4, **NO_BIAS}, "a g c^ -> a g c^",
    ),
    "batch norm": (
        "batch_norm", {"input": real(6, 4, 5), "weight": real(4), "bias": real(4), "training": True, **FRESH},
        "n=batch ch c^, ch, ch -> n ch c^",
    ),
    "batch norm, eval": (
        "batch_norm", {"input": real(6, 4, 5), "training": False, **NO_BIAS, **KEPT}, "n ch c^, ch, ch -> n ch c^",
    ),
    "instance norm": (
        "instance_norm", {"input": real(6, 4, 5), "weight": real(4), "bias": None, "use_input_stats": True, **FRESH},
        "a b c^, b -> a b c^",
    ),
    "renorm": ("renorm", {"self": X, "p": 2, "dim": 1, "maxnorm": 1.0}, "a^ b c^ -> a b c"),
}  # fmt: skip

LOSSES: Written = {
    "cross entropy": (
        "cross_entropy_loss.default", {"self": real(6, 4), "target": ids(4, 6)},
        "na=samples+ c=classes, na=samples+ ->",
    ),
    "cross entropy, summed, of pictures": (
        "cross_entropy_loss.default", {"self": real(6, 4, 5), "target": ids(4, 6, 5), "reduction": 2},
        "na+ c=classes nb+, na+ nb+ ->",
    ),
    "cross entropy, none": (
        "cross_entropy_loss.default", {"self": real(6, 4), "target": ids(4, 6), "reduction": 0},
        "na c=classes, na -> na",
    ),
    "cross entropy, weights": (
        "cross_entropy_loss.default", {"self": real(6, 4), "target": ids(4, 6), "weight": real(4).abs()},
        "na=samples+ c=classes, na=samples+, 4 ->",
    ),
    "cross entropy, probabilities": (
        "cross_entropy_loss.default", {"self": real(6, 4), "target": real(6, 4).softmax(1)},
        "na=samples+ 4, na=samples+ 4 ->",
    ),
    "cross entropy, one row": (
        "cross_entropy_loss.default", {"self": real(4), "target": torch.tensor(1)}, "c=classes, ->",
    ),
    "cross entropy, one row of probabilities": (
        "cross_entropy_loss.default", {"self": real(4), "target": real(4).softmax(0)}, None,
    ),
    "cross entropy, one row and weights": (
        "cross_entropy_loss.default", {"self": real(4), "target": torch.tensor(1), "weight": real(4).abs()}, None,
    ),
    "nll": (
        "nll_loss_nd.default", {"self": real(6, 4, 5), "target": ids(4, 6, 5)},
        "na=samples+ 4 nb=samples+, na=samples+ nb=samples+ ->",
    ),
    "nll, none": ("nll_loss_nd.default", {"self": real(6, 4), "target": ids(4, 6), "reduction": 0}, "na 4, na -> na"),
    "nll, one row": ("nll_loss_nd.default", {"self": real(4), "target": torch.tensor(1)}, None),
    "kl": ("kl_div", {"self": real(6, 4), "target": real(4).abs()}, "a+ b+, b+ ->"),
    "kl, none": ("kl_div", {"self": real(6, 4), "target": real(6, 1).abs(), "reduction": 0}, "a b, a 1 -> a b"),
    "triplets": (
        "triplet_margin_loss", {"anchor": real(6, 4), "positive": real(6, 4) + 1, "negative": real(6, 4) - 1},
        "a+ 4, a+ 4, a+ 4 ->",
    ),
    "margins, none": ("multi_margin_loss", {"self": real(6, 4), "target": ids(4, 6), "reduction": 0}, "a 4, a -> a"),
    "margins, weights": ("multi_margin_loss", {"self": real(6, 4), "target": ids(4, 6), "weight": real(4).abs()}, None),
    "cosines": ("cosine_similarity", {"x1": real(6, 4, 3), "x2": real(6, 4, 1) + 1, "dim": 1}, "a 4 c, a 4 1 -> a c"),
    "distances, kept": (
        "pairwise_distance", {"x1": real(6, 4), "x2": real(1, 4) + 1, "keepdim": True}, "a 4, 1 4 -> a 1",
    ),
    "distances, fewer dims": ("pairwise_distance", {"x1": real(6, 4), "x2": real(4) + 1}, None),
}  # fmt: skip

LOOKUPS: Written = {
    "embedding": ("embedding", {"weight": real(6, 4), "indices": ids(6, 3, 1)}, "v=rows+ d ~1, ia 1 -> ia 1 d"),
    "embedding of one row": ("embedding", {"weight": real(1, 4), "indices": ids(1, 3)}, "1 d, ia -> ia d"),
    "scatter": (
        "scatter.src", {"self": X, "dim": 1, "index": COLUMN.expand(6, 4, 6).contiguous(), "src": real(6, 4, 6)},
        "a b^ c ~1, a 4 c, a 4 c ~1 -> a b c",
    ),
    "scatter, fewer rows": (
        "scatter.src", {"self": X, "dim": 1, "index": COLUMN.expand(2, 4, 6).contiguous(), "src": real(2, 4, 6)},
        "a^ b^ c ~1, 2 4 c, 2 4 c ~1 -> a b c",
    ),
    "scatter a number": (
        "scatter.value", {"self": X, "dim": 1, "index": ids(4, 6, 2, 6), "value": 2.0}, "a b^ c, a 2 c -> a b c",
    ),
    "scatter, added": (
        "scatter_add", {"self": X, "dim": 1, "index": ids(4, 6, 2, 6), "src": real(6, 2, 6)},
        "a b^ c&, a i+ c, a i+ c -> a b c",
    ),
    "scatter, added, less than there is": (
        "scatter_add", {"self": ids(9, 6, 4, 6), "dim": 1, "index": ids(4, 6, 2, 6), "src": ids(9, 6, 3, 6)},
        "a b^ c, a 2 c, a 3 c -> a b c",
    ),
    "index_select": ("index_select", {"self": X, "dim": 1, "index": ids(4, 3)}, "a 4 c ~1, i -> a i c"),
    "index_select of one": ("index_select", {"self": X, "dim": 1, "index": ids(4, 1)}, "a 4 c ~1, 1 -> a 1 c"),
    "index_add": (
        "index_add", {"self": X, "dim": 1, "index": ids(4, 3), "source": real(6, 3, 6)}, "a b^ c&, i+, a i+ c -> a b c",
    ),
    "index_copy": (
        "index_copy", {"self": X, "dim": 1, "index": torch.tensor([2, 0]), "source": real(6, 2, 6)},
        "a b^ c ~1, 2, a 2 c ~1 -> a b c",
    ),
    "index_fill": (
        "index_fill.int_Scalar", {"self": X, "dim": 1, "index": torch.tensor([2, 0]), "value": 1.0},
        "a b^ c, 2 -> a b c",
    ),
    "x[i]": ("index.Tensor", {"self": X, "indices": [ids(6, 3)]}, "6 b c ~1, ia -> ia b c"),
    "x[:, i]": ("index.Tensor", {"self": X, "indices": [None, ids(4, 3, 2)]}, "a 4 c ~1, ia ib -> a ia ib c"),
    "x[i, :, j]": (
        "index.Tensor", {"self": X, "indices": [ids(6, 3), None, ids(6, 2, 1)]}, "6 b 6 ~1, ib, ia 1 -> ia ib b",
    ),
    "x[:, i, j]": ("index.Tensor", {"self": X, "indices": [None, ids(4, 3), ids(6, 1)]}, "a 4 6 ~1, ia, 1 -> a ia"),
    "x[:, i, :, j]": (
        "index.Tensor", {"self": real(2, 3, 4, 5), "indices": [None, ids(3, 6), None, ids(5, 6)]},
        "a 3 c 5 ~1, ia, ia -> ia a c",
    ),
    "x[mask]": ("index.Tensor", {"self": X, "indices": [truths(6)]}, None),
    "x[i] = y": (
        "index_put", {"self": X, "indices": [torch.tensor([2, 0])], "values": real(2, 4, 6)},
        "6 b c, ia^, ia^ b c -> 6 b c",
    ),
    "x[i] += y": (
        "index_put", {"self": X, "indices": [ids(6, 3)], "values": real(4, 6), "accumulate": True},
        "6 b c&, ia+, b c -> 6 b c",
    ),
    "one hot": ("one_hot", {"self": ids(4, 6, 3), "num_classes": 4}, "a b -> a b 4"),
    "embedding_bag": (
        "embedding_bag.default", {"weight": real(6, 4), "indices": ids(6, 8), "offsets": torch.tensor([0, 3])},
        "6 d, 8, 2 -> 2 d, 8, 2, 2",
    ),
    "searchsorted, a table a row": (
        "searchsorted.Tensor", {"sorted_sequence": real(6, 4).sort(1)[0], "self": real(6, 3)}, "a 4, a b -> a b",
    ),
    "searchsorted, one table": (
        "searchsorted.Tensor", {"sorted_sequence": real(4).sort()[0], "self": real(6, 3)}, "4, a b -> a b",
    ),
    "bucketize": ("bucketize.Tensor", {"self": real(6, 3), "boundaries": real(4).sort()[0]}, "a b, 4 -> a b"),
    "take_along_dim, flat": ("take_along_dim", {"self": X, "indices": ids(9, 3), "dim": None}, None),
    "gather, as many as there are": (
        "gather", {"self": X, "dim": 1, "index": ids(4, 6, 4, 6)}, "a 4 c ~1, a b c -> a b c",
    ),
    "gather, fewer rows": ("gather", {"self": X, "dim": 1, "index": ids(4, 3, 4, 6)}, "6 4 c ~1, 3 b c -> 3 b c"),
}  # fmt: skip

VIEWS: Written = {
    "view, heads": ("view", {"self": X, "size": [6, 2, 2, 6]}, "x0 (x1 x2) x3 ~1 -> x0 x1 x2 x3"),
    "view, a clash": ("view", {"self": X, "size": [6, 8, 3]}, "x0 x1 (x2 x3) ~1 -> x0 (x1 x2) x3"),
    "view, ones": ("view", {"self": real(6, 1, 4), "size": [1, 6, 4]}, "x0 1 x1 ~1 -> 1 x0 x1"),
    "transpose": ("transpose.int", {"self": X, "dim0": 0, "dim1": -1}, "a b c ~1 -> c b a"),
    "t": ("t", {"self": real(4, 6)}, "a b ~1 -> b a"),
    "t of a vector": ("t", {"self": real(4)}, "a ~1 -> a"),
    "roll": ("roll", {"self": X, "shifts": [1], "dims": [1]}, "a b^ c ~1 -> a b c"),
    "roll of all": ("roll", {"self": X, "shifts": [1]}, "a^ b^ c^ ~1 -> a b c"),
    "fliplr": ("fliplr", {"self": X}, "a b^ c ~1 -> a b c"),
    "flipud": ("flipud", {"self": X}, "a^ b c ~1 -> a b c"),
    "a quarter turn": ("rot90", {"self": X, "k": 1, "dims": [0, 1]}, "a^ b^ c ~1 -> b^ a^ c"),
    "a half turn": ("rot90", {"self": X, "k": 2, "dims": [1, 2]}, "a b^ c^ ~1 -> a b c"),
    "expand": ("expand", {"self": real(4, 1), "size": [6, 4, 3]}, "b 1 ~1 -> a b c"),
    "repeat": ("repeat", {"self": real(4, 1), "repeats": [2, 3, 5]}, "a 1 ~1 -> 2 (3 a) 5"),
    "repeat_interleave": ("repeat_interleave.self_int", {"self": X, "repeats": 2, "dim": 1}, "a b c ~1 -> a (b 2) c"),
    "repeat_interleave, once": ("repeat_interleave.self_int", {"self": X, "repeats": 1, "dim": 1}, None),
    "repeat_interleave, flat": ("repeat_interleave.self_int", {"self": X, "repeats": 2}, None),
    "x[:, 1]": ("select.int", {"self": X, "dim": 1, "index": 1}, "a b^ c ~1 -> a c"),
    "x[:, 2:]": ("slice.Tensor", {"self": X, "dim": 1, "start": -2, "end": None}, "a (2 b) c ~1 -> a b c"),
    "x[:, 1:3]": ("slice.Tensor", {"self": X, "dim": 1, "start": 1, "end": 3}, "a 4 c ~1 -> a 2 c"),
    "x[:, ::2]": ("slice.Tensor", {"self": X, "dim": 1, "start": 0, "end": 4, "step": 2}, "a 4 c ~1 -> a 2 c"),
    "x[:, :1]": ("slice.Tensor", {"self": X, "dim": 1, "start": 0, "end": 1}, "a 4 c ~1 -> a 1 c"),
    "x[:, :]": ("slice.Tensor", {"self": X, "dim": 1, "start": None, "end": 9}, "a b c ~1 -> a b c"),
    "split in halves": ("split.Tensor", {"self": X, "split_size": 2, "dim": 1}, "a (2 p) c ~1 -> a p c, a p c"),
    "split in ones": ("split.Tensor", {"self": X, "split_size": 1, "dim": 1}, "a 4 c ~1 -> a 1 c, a 1 c, a 1 c, a 1 c"),
    "split unevenly": (
        "split_with_sizes", {"self": X, "split_sizes": [3, 1], "dim": 1}, "a (p0 | 1) c ~1 -> a p0 c, a 1 c",
    ),
    "split in one": ("split.Tensor", {"self": X, "split_size": 4, "dim": 1}, "a b c ~1 -> a b c"),
    "unbind": ("unbind.int", {"self": X, "dim": 1}, "a b^ c ~1 -> a c, a c, a c, a c"),
    "cat of equals": ("cat", {"tensors": [X, X], "dim": 1}, "a p c ~1, a p c ~1 -> a (2 p) c"),
    "cat, uneven": ("cat", {"tensors": [X, real(6, 1, 6)], "dim": -2}, "a p0 c ~1, a 1 c ~1 -> a (p0 | 1) c"),
    "cat of ones": ("cat", {"tensors": [real(6, 1), real(6, 1)], "dim": 1}, "a 1 ~1, a 1 ~1 -> a 2"),
    "cat of one": ("cat", {"tensors": [X], "dim": 1}, "? -> 6 4 6"),
    "cat with nothing": ("cat", {"tensors": [X, real(0)], "dim": 1}, "?, ? -> 6 4 6"),
    "tril": ("tril", {"self": X}, "a b^ c^ ~1 -> a b c"),
    "unfold, side by side": (
        "unfold", {"self": X, "dimension": 2, "size": 3, "step": 3}, "a b (win 3) ~1 -> a b win 3",
    ),
    "unfold, overlapping": ("unfold", {"self": X, "dimension": 2, "size": 3, "step": 1}, "a b 6 ~1 -> a b 4 3"),
    "unfold, single elements": ("unfold", {"self": X, "dimension": 2, "size": 1, "step": 1}, "a b win ~1 -> a b win 1"),
    "slice_scatter": (
        "slice_scatter", {"self": X, "src": real(6, 2, 6), "dim": 1, "start": 1, "end": 3},
        "a b^ c ~1, a 2 c ~1 -> a b c",
    ),
    "select_scatter": (
        "select_scatter", {"self": X, "src": real(6, 6), "dim": 1, "index": 2}, "a b^ c ~1, a c ~1 -> a b c",
    ),
    "pad the last dim": ("constant_pad_nd", {"self": X, "pad": [1, 2], "value": 0}, "a b c^ ~1 -> a b 9"),
    "pad the dim before": ("constant_pad_nd", {"self": X, "pad": [0, 0, 1, 1], "value": 0}, "a b^ c ~1 -> a 6 c"),
    "pad here, cut there": ("constant_pad_nd", {"self": X, "pad": [1, -1], "value": 0}, "a b c^ ~1 -> a b c"),
    "pad with a number": ("constant_pad_nd", {"self": X, "pad": [1, 2], "value": 1.5}, "a b c^ -> a b 9"),
    "stack 3 rows": ("stack", {"tensors": [real(3, 3)] * 3, "dim": 0}, ", ".join(["a b ~1"] * 3) + " -> 3 a b"),
    "stack inside": ("stack", {"tensors": [real(4, 4)] * 4, "dim": 1}, ", ".join(["a b ~1"] * 4) + " -> a 4 b"),
    "stack at the end": ("stack", {"tensors": [real(4, 6), real(4, 6)], "dim": -1}, "a b ~1, a b ~1 -> a b 2"),
}  # fmt: skip

POINTWISE: Written = {
    "x * x is two values": ("mul.Tensor", {"self": real(4, 1), "other": real(1, 6)}, "a 1 ~1, 1 b ~2 -> a b"),
    "where": (
        "where.self", {"condition": truths(4, 6), "self": real(4, 6), "other": real(6)}, "a b, a b ~1, b ~1 -> a b",
    ),
    "where, a number": (
        "where.ScalarOther", {"condition": truths(4, 6), "self": real(4, 6), "other": 1.0}, "a b, a b -> a b",
    ),
    "cast to whole numbers": ("_to_copy", {"self": X, "dtype": torch.int64}, "a b c -> a b c"),
    "cast to a float": ("_to_copy", {"self": ids(4, 6), "dtype": torch.float64}, "a ~1 -> a"),
    "prelu, a slope a channel": ("prelu", {"self": real(6, 4, 2), "weight": real(4)}, "a b c, b -> a b c"),
    "prelu, one slope": ("prelu", {"self": real(6, 4), "weight": real(1)}, "a b, 1 -> a b"),
    "glu": ("glu", {"self": real(6, 4), "dim": 1}, "a (2 b) -> a b"),
    "glu of two": ("glu", {"self": real(6, 2), "dim": 1}, "a 2 -> a 1"),
    "x + 1": ("add.Tensor", {"self": X, "other": 1.5}, "a b c -> a b c"),
    "x + y": ("add.Tensor", {"self": X, "other": real(4, 1)}, "a b c ~1, b 1 ~1 -> a b c"),
    "x * 2": ("mul.Tensor", {"self": X, "other": 2.5}, "a b c ~1 -> a b c"),
    "x / y": ("div.Tensor", {"self": X, "other": real(4, 1).exp()}, "a b c ~1, b 1 -> a b c"),
    "x / 2": ("div.Tensor", {"self": X, "other": 2.5}, "a b c ~1 -> a b c"),
}  # fmt: skip

TRANSFORMS: Written = {
    "fft": ("fft_fft", {"self": X}, "a b c^ ~1 -> a b c"),
    "fft2": ("fft_fft2", {"self": X}, "a b^ c^ ~1 -> a b c"),
    "fftn, by sizes": ("fft_fftn", {"self": X, "s": [6]}, "a b c^ ~1 -> a b c"),
    "fftn": ("fft_fftn", {"self": X}, "a^ b^ c^ ~1 -> a b c"),
    "fftshift": ("fft_fftshift", {"self": X, "dim": [1]}, "a b^ c ~1 -> a b c"),
    "view as real": ("view_as_real", {"self": torch.complex(real(4, 6), real(4, 6) + 1)}, "a b ~1 -> a b 2"),
    "view as complex": ("view_as_complex", {"self": real(4, 6, 2)}, "a b 2 ~1 -> a b"),
    "determinants": ("linalg_det", {"A": real(6, 3, 3)}, "a 3 3 -> a"),
    "solve": ("linalg_solve", {"A": real(6, 3, 3), "B": real(6, 3, 2)}, "a 3 3, a 3 2 -> a 3 2"),
    "solve, rows that broadcast": ("linalg_solve", {"A": real(6, 3, 3), "B": real(3, 2)}, None),
    "trace": ("trace", {"self": real(4, 4)}, "4 4 ~1 ->"),
    "lstm": (
        "lstm.input",
        {"input": real(2, 6, 4), "hx": [real(1, 6, 3), real(1, 6, 3)], "params": [real(12, 4), real(12, 3)],
         "has_biases": False, "num_layers": 1, "dropout": 0.0, "train": False, "bidirectional": False,
         "batch_first": False},
        "s^ b 4, 1 b 3, 1 b 3, 12 4, 12 3 -> s^ b 3, 1 b 3, 1 b 3",
    ),
    "gru, rows first": (
        "gru.input",
        {"input": real(6, 2, 4), "hx": real(1, 6, 3), "params": [real(9, 4), real(9, 3)], "has_biases": False,
         "num_layers": 1, "dropout": 0.0, "train": False, "bidirectional": False, "batch_first": True},
        "b s^ 4, 1 b 3, 9 4, 9 3 -> b s^ 3, 1 b 3",
    ),
    "gru of one row": (
        "gru.input",
        {"input": real(2, 1, 4), "hx": real(1, 1, 3), "params": [real(9, 4), real(9, 3)], "has_biases": False,
         "num_layers": 1, "dropout": 0.0, "train": False, "bidirectional": False, "batch_first": False},
        "s^ 1 4, 1 1 3, 9 4, 9 3 -> s^ 1 3, 1 1 3",
    ),
    "gru of one row, rows first": (
        "gru.input",
        {"input": real(1, 2, 4), "hx": real(1, 1, 3), "params": [real(9, 4), real(9, 3)], "has_biases": False,
         "num_layers": 1, "dropout": 0.0, "train": False, "bidirectional": False, "batch_first": True},
        "1 s^ 4, 1 1 3, 9 4, 9 3 -> 1 s^ 3, 1 1 3",
    ),
    "gru of two rows": (
        "gru.input",
        {"input": real(3, 2, 4), "hx": real(1, 2, 3), "params": [real(9, 4), real(9, 3)], "has_biases": False,
         "num_layers": 1, "dropout": 0.0, "train": False, "bidirectional": False, "batch_first": False},
        "s^ b 4, 1 b 3, 9 4, 9 3 -> s^ b 3, 1 b 3",
    ),
    "lstm cell": (
        "lstm_cell", {"input": real(6, 4), "hx": [real(6, 3), real(6, 3)], "w_ih": real(12, 4), "w_hh": real(12, 3)},
        "a 4, a 3, a 3, 12 4, 12 3 -> a 3, a 3",
    ),
    "cross of the last dim": ("linalg_cross", {"self": real(3, 3), "other": real(3, 3) + 1}, "a 3 ~1, a 3 ~2 -> a 3"),
    "cross of rows that broadcast": ("linalg_cross", {"self": real(6, 3), "other": real(1, 3)}, None),
    "cross": ("cross", {"self": real(6, 3), "other": real(6, 3) + 1, "dim": 1}, "a 3 ~1, a 3 ~2 -> a 3"),
    "diagonal": ("diagonal", {"self": real(4, 6, 4), "dim1": 0, "dim2": 2}, "a^ b c^ ~1 -> b 4"),
    "diag_embed": ("diag_embed", {"self": real(4, 6)}, "a 6 ~1 -> a 6 6"),
    "diag_embed, first": ("diag_embed", {"self": real(4, 6), "dim1": 0, "dim2": 2}, "a 6 ~1 -> 6 a 6"),
}  # fmt: skip

SPACE: Written = {
    "max pool": ("max_pool2d", {"self": real(2, 3, 4, 6), "kernel_size": [2, 2]}, "a b c^ d^ -> a b 2 3"),
    "max pool with indices, one picture": (
        "max_pool2d_with_indices", {"self": real(3, 4, 6), "kernel_size": [2, 2]}, "a b^ c^ -> a 2 3, a 2 3",
    ),
    "average pool": ("avg_pool1d", {"self": real(2, 3, 6), "kernel_size": [2]}, "a b c^ ~1 -> a b 3"),
    "upsample": (
        "upsample_nearest2d.vec", {"input": real(2, 3, 4, 6), "output_size": None, "scale_factors": [2.0, 2.0]},
        "a b c^ d^ ~1 -> a b 8 12",
    ),
    "reflection pad": ("reflection_pad2d", {"self": real(2, 3, 4, 6), "padding": [1] * 4}, "a b c^ d^ ~1 -> a b 6 8"),
    "replication pad, one signal": ("replication_pad1d", {"self": real(3, 6), "padding": [1, 2]}, "a b^ ~1 -> a 9"),
    "pixel shuffle": (
        "pixel_shuffle", {"self": real(2, 8, 4, 6), "upscale_factor": 2}, "ba (c 4) 4 6 ~1 -> ba c 8 12",
    ),
    "pixel shuffle to one channel": (
        "pixel_shuffle", {"self": real(2, 4, 4, 6), "upscale_factor": 2}, "ba 4 4 6 ~1 -> ba 1 8 12",
    ),
    "pixel unshuffle": (
        "pixel_unshuffle", {"self": real(2, 3, 4, 6), "downscale_factor": 2}, "ba c 4 6 ~1 -> ba (c 4) 2 3",
    ),
    "channel shuffle": (
        "channel_shuffle", {"self": real(2, 6, 4, 5), "groups": 2}, "a (2 ch) c d ~1 -> a (ch 2) c d",
    ),
    "im2col": (
        "im2col", {"self": real(2, 3, 4, 6), "kernel_size": [2, 2], "dilation": [1, 1], "padding": [0, 0],
                   "stride": [1, 1]},
        "ba c 4 6 ~1 -> ba (c 4) 15",
    ),
    "grid sample": (
        "grid_sampler", {"input": real(2, 3, 4, 6), "grid": real(2, 5, 5, 2).tanh(), "interpolation_mode": 0,
                         "padding_mode": 0, "align_corners": False},
        "a b 4 6 ~1, a x y 2 -> a b x y",
    ),
}  # fmt: skip

WRITTEN: Written = {
    **PRODUCTS, **REDUCTIONS, **NORMS, **LOSSES, **LOOKUPS, **VIEWS, **POINTWISE, **TRANSFORMS, **SPACE
}  # fmt: skip
