"""Ways to draw the arguments of ops that are not pointwise and no products (see drawn.py)."""

from __future__ import annotations

import math
from typing import Any

import torch

from tests.rules.drawn import Arguments, Dice, Way, way

# Reductions.


def _reduced(dims: str, **more: Any) -> Way:
    """dims: "none" takes all, "one" a dim, "some" several; keepdim where the op has it."""

    def draw(dice: Dice) -> Arguments:
        shape = dice.shape(1, 4)
        inputs: Arguments = {"self": dice.real(*shape), **more}
        if dims == "one":
            inputs["dim"] = dice.dim(len(shape))
        if dims in ("some", "maybe"):
            inputs["dim"] = None if dims == "maybe" and dice.of(0, 0, 1) else dice.dims(len(shape))
        if dims != "none":
            inputs["keepdim"] = dice.of(True, False)
        return inputs

    return draw


for _target in ("sum", "mean", "max", "min", "var", "std", "prod", "median", "nanmedian", "any", "all"):
    way(f"aten.{_target}.default")(_reduced("none"))
way("aten.var_mean.default", "aten.std_mean.default")(_reduced("none"))
way("aten.nansum.default", "aten.nanmean.default", "aten.sum.dim_IntList", "aten.mean.dim")(_reduced("maybe"))
way("aten.amax.default", "aten.amin.default", "aten.logsumexp.default", "aten.special_logsumexp.default")(
    _reduced("some")
)
way("aten.any.dims", "aten.all.dims")(_reduced("some"))
way("aten.max.dim", "aten.min.dim", "aten.argmax.default", "aten.argmin.default", "aten.any.dim", "aten.all.dim",
    "aten.prod.dim_int", "aten.median.dim", "aten.nanmedian.dim", "aten.mode.default", "aten.aminmax.default",
    )(_reduced("one"))  # fmt: skip
way("aten.var.correction", "aten.std.correction", "aten.var_mean.correction", "aten.std_mean.correction")(
    _reduced("maybe", correction=0)
)
way("aten.var.dim", "aten.std.dim", "aten.var_mean.dim", "aten.std_mean.dim")(_reduced("some", unbiased=False))
way("aten.linalg_vector_norm.default")(_reduced("maybe", ord=2))
way("aten.norm.ScalarOpt_dim")(_reduced("some", p=2))
way("aten.quantile.scalar", "aten.nanquantile.scalar")(_reduced("one", q=0.5))
way("aten.kthvalue.default")(_reduced("one", k=1))


@way("aten.count_nonzero.default")
def _count_all(dice: Dice) -> Arguments:
    return {"self": dice.ints(2, *dice.shape()), "dim": None}


@way("aten.count_nonzero.dim_IntList")
def _count_some(dice: Dice) -> Arguments:
    shape = dice.shape()
    return {"self": dice.ints(2, *shape), "dim": dice.dims(len(shape))}


@way("aten.norm.Scalar")
def _norm(dice: Dice) -> Arguments:
    return {"self": dice.real(*dice.shape()), "p": 2}


@way("aten.frobenius_norm.dim", "aten.linalg_norm.default")
def _matrix_norm(dice: Dice) -> Arguments:
    return {"self": dice.real(*dice.shape(3, 4)), "dim": [-2, -1], "keepdim": dice.of(True, False)}


def _along(*, plain: bool = False, **more: Any) -> Way:
    def draw(dice: Dice) -> Arguments:
        shape = dice.shape(1, 4)
        return {"self": dice.real(*shape), "dim": dice.dim(len(shape)), **more}

    return draw


way("_softmax", "_log_softmax")(_along(half_to_float=False))
way("aten.softmax.int", "aten.log_softmax.int", "aten.sort.default", "aten.argsort.default", "cumsum", "cumprod",
    "cummax", "cummin", "logcumsumexp")(_along())  # fmt: skip
way("aten.sort.stable", "aten.argsort.stable")(_along(stable=True))


@way("aten.trapezoid.dx")
def _trapezoid(dice: Dice) -> Arguments:
    shape = dice.shape(1, 4)
    return {"y": dice.real(*shape), "dim": dice.dim(len(shape))}


@way("aten.diff.default")
def _diff(dice: Dice) -> Arguments:
    lead = dice.shape(0, 2)
    more = {"prepend": dice.real(*lead, 2)} if dice.of(True, False) else {}
    return {"self": dice.real(*lead, dice.size(2)), "dim": -1, **more}


@way("aten.topk.default")
def _topk(dice: Dice) -> Arguments:
    shape = dice.shape(1, 4)
    dim = dice.dim(len(shape))
    return {"self": dice.real(*shape), "k": min(2, shape[dim]), "dim": dim}


# Norms.


def _trailing(weights: int, **more: Any) -> Way:
    def draw(dice: Dice) -> Arguments:
        inner = dice.shape(1, 2)
        names = ("weight", "bias")[:weights]
        return {
            "input": dice.real(*dice.shape(1, 2), *inner), "normalized_shape": list(inner),
            **{name: dice.real(*inner) for name in names}, **more,
        }  # fmt: skip

    return draw


way("layer_norm", "native_layer_norm")(_trailing(2, eps=1e-5))
way("rms_norm", "_fused_rms_norm")(_trailing(1, eps=1e-5))


@way("group_norm")
def _group_norm(dice: Dice) -> Arguments:
    groups, inside = dice.size(), dice.of(1, 2, 3)
    c = groups * inside
    return {
        "input": dice.real(dice.size(), c, *dice.shape(1, 2)), "num_groups": groups, "weight": dice.real(c),
        "bias": dice.real(c),
    }  # fmt: skip


@way("native_group_norm")
def _native_group_norm(dice: Dice) -> Arguments:
    groups, inside, samples, shape = dice.size(), dice.of(1, 2, 3), dice.size(), dice.shape(1, 2)
    c = groups * inside
    return {
        "input": dice.real(samples, c, *shape), "weight": dice.real(c), "bias": dice.real(c), "N": samples, "C": c,
        "HxW": math.prod(shape), "group": groups, "eps": 1e-5,
    }  # fmt: skip


@way("instance_norm")
def _instance_norm(dice: Dice) -> Arguments:
    c = dice.size()
    affine = dice.of(True, False)
    return {
        "input": dice.real(dice.size(), c, 4, *dice.shape(0, 1)), "weight": dice.real(c) if affine else None,
        "bias": dice.real(c) if affine else None, "running_mean": None, "running_var": None, "use_input_stats": True,
        "momentum": 0.1, "eps": 1e-5, "cudnn_enabled": False,
    }  # fmt: skip


@way("renorm")
def _renorm(dice: Dice) -> Arguments:
    shape = dice.shape(2, 3)
    return {"self": dice.real(*shape), "p": 2, "dim": dice.dim(len(shape)), "maxnorm": 1.0}


@way("batch_norm")
def _batch_norm(dice: Dice) -> Arguments:
    c = dice.size()
    return {
        "input": dice.real(dice.size(), c, *dice.shape(0, 2)), "weight": dice.real(c), "bias": dice.real(c),
        "running_mean": dice.real(c), "running_var": dice.real(c, low=0.5), "training": False, "momentum": 0.1,
        "eps": 1e-5, "cudnn_enabled": False,
    }  # fmt: skip


# Space.


def _space(rank: int, **more: Any) -> Way:
    def draw(dice: Dice) -> Arguments:
        lead = dice.shape(2, 2) if dice.of(1, 1, 0) or "output_size" not in more else dice.shape(1, 1)
        return {"self": dice.real(*lead, *[dice.of(4, 5, 6) for _ in range(rank)]), **more}

    return draw


for _n in (1, 2, 3):
    way(f"max_pool{_n}d", f"max_pool{_n}d_with_indices")(_space(_n, kernel_size=[2] * _n, stride=[2] * _n))
    way(f"avg_pool{_n}d")(_space(_n, kernel_size=[2] * _n, stride=[1] * _n))
    way(f"adaptive_avg_pool{_n}d", f"_adaptive_avg_pool{_n}d", f"adaptive_max_pool{_n}d")(
        _space(_n, output_size=[2] * _n)
    )
    for _kind in ("upsample_nearest", "_upsample_nearest_exact"):
        way(f"aten.{_kind}{_n}d.vec")(lambda dice, n=_n: _scaled(dice, n, None))
        way(f"aten.{_kind}{_n}d.default")(lambda dice, n=_n: _resized(dice, n, None))
    way(f"reflection_pad{_n}d", f"replication_pad{_n}d")(_space(_n, padding=[1, 2] * _n))


def _scaled(dice: Dice, rank: int, corners: bool | None) -> Arguments:
    more = {} if corners is None else {"align_corners": corners}
    return {
        "input": dice.real(*dice.shape(2, 2), *[4] * rank), "output_size": None, **more, "scale_factors": [2.0] * rank
    }  # fmt: skip


def _resized(dice: Dice, rank: int, corners: bool | None) -> Arguments:
    more = {} if corners is None else {"align_corners": corners}
    return {"self": dice.real(*dice.shape(2, 2), *[4] * rank), "output_size": [3] * rank, **more}


for _kind, _n in (("linear", 1), ("bilinear", 2), ("trilinear", 3), ("bicubic", 2)):
    way(f"aten.upsample_{_kind}{_n}d.vec")(lambda dice, n=_n: _scaled(dice, n, dice.of(True, False)))
    way(f"aten.upsample_{_kind}{_n}d.default")(lambda dice, n=_n: _resized(dice, n, dice.of(True, False)))
for _kind in ("bilinear", "bicubic"):
    way(f"aten._upsample_{_kind}2d_aa.vec")(lambda dice: _scaled(dice, 2, False))
    way(f"aten._upsample_{_kind}2d_aa.default")(lambda dice: _resized(dice, 2, False))


@way("pixel_shuffle")
def _pixel_shuffle(dice: Dice) -> Arguments:
    return {"self": dice.real(*dice.shape(1, 2), dice.size() * 4, 2, 3), "upscale_factor": 2}


@way("pixel_unshuffle")
def _pixel_unshuffle(dice: Dice) -> Arguments:
    return {"self": dice.real(*dice.shape(1, 2), dice.size(), 4, 6), "downscale_factor": 2}


@way("channel_shuffle", "native_channel_shuffle")
def _channel_shuffle(dice: Dice) -> Arguments:
    groups = dice.size()
    return {"self": dice.real(dice.size(), groups * dice.size(), 2, 3), "groups": groups}


@way("im2col")
def _im2col(dice: Dice) -> Arguments:
    return {
        "self": dice.real(*dice.shape(1, 2), 4, 5), "kernel_size": [2, 3], "dilation": [1, 1], "padding": [0, 1],
        "stride": [1, 1],
    }  # fmt: skip


@way("col2im")
def _col2im(dice: Dice) -> Arguments:
    return {
        "self": dice.real(dice.size(), dice.size() * 4, 6), "output_size": [3, 4], "kernel_size": [2, 2],
        "dilation": [1, 1], "padding": [0, 0], "stride": [1, 1],
    }  # fmt: skip


def _sampled(rank: int) -> Way:
    def draw(dice: Dice) -> Arguments:
        n = dice.size()
        return {
            "input": dice.real(n, dice.size(), *[4] * rank), "grid": dice.real(n, *dice.shape(rank, rank), rank),
            "interpolation_mode": 0, "padding_mode": 0, "align_corners": False,
        }  # fmt: skip

    return draw


way("grid_sampler", "grid_sampler_2d")(_sampled(2))
way("grid_sampler_3d")(_sampled(3))


@way("affine_grid_generator")
def _affine_grid(dice: Dice) -> Arguments:
    n = dice.size()
    return {"theta": dice.real(n, 2, 3), "size": [n, 3, 4, 5], "align_corners": False}


def _unpooled(rank: int) -> Way:
    def draw(dice: Dice) -> Arguments:
        lead = dice.shape(2, 2)
        x = dice.real(*lead, *[4] * rank)
        function = torch.nn.functional.max_pool2d if rank == 2 else torch.nn.functional.max_pool3d
        y, places = function(x, 2, return_indices=True)
        more = {} if rank == 2 else {"stride": [2] * 3, "padding": [0] * 3}
        return {"self": y, "indices": places, "output_size": [4] * rank, **more}

    return draw


way("max_unpool2d")(_unpooled(2))
way("max_unpool3d")(_unpooled(3))


# Fourier transforms, matrices, recurrent nets.


def _fft(real: bool, dims: str) -> Way:
    def draw(dice: Dice) -> Arguments:
        shape = (*dice.shape(1, 2), dice.size(2), dice.size(2))
        x = dice.real(*shape) if real else dice.complex(*shape)
        rank = len(shape)
        stored: Any = dice.dim(rank) if dims == "one" else dice.of(None, [-1], [-2, -1]) if dims == "any" else [-2, -1]
        if dims == "one" and shape[stored] < 2:
            stored = -1
        return {"self": x, "dim": stored}

    return draw


way("fft_fft", "fft_ifft")(_fft(False, "one"))
way("fft_irfft", "fft_hfft")(_fft(False, "one"))
way("fft_rfft", "fft_ihfft")(_fft(True, "one"))
way("fft_fft2", "fft_ifft2", "fft_irfft2")(_fft(False, "two"))
way("fft_rfft2")(_fft(True, "two"))
way("fft_fftn", "fft_ifftn", "fft_irfftn", "fft_fftshift", "fft_ifftshift")(_fft(False, "any"))
way("fft_rfftn")(_fft(True, "any"))


@way("aten.stft.default", "aten.stft.center")
def _stft(dice: Dice) -> Arguments:
    return {
        "self": dice.real(*dice.shape(0, 1), 16), "n_fft": 4, "hop_length": 2, "window": dice.real(4),
        "normalized": False, "onesided": True, "return_complex": True,
    }  # fmt: skip


@way("istft")
def _istft(dice: Dice) -> Arguments:
    return {
        "self": dice.complex(*dice.shape(0, 1), 3, 9), "n_fft": 4, "hop_length": 2,
        "window": torch.ones(4, dtype=torch.float64),
    }  # fmt: skip


@way("view_as_real", "aten.view_as_real_copy.default")
def _as_real(dice: Dice) -> Arguments:
    return {"self": dice.complex(*dice.shape())}


@way("view_as_complex")
def _as_complex(dice: Dice) -> Arguments:
    return {"self": dice.real(*dice.shape(1, 3), 2)}


def _matrix(**more: Any) -> Way:
    def draw(dice: Dice) -> Arguments:
        x = dice.real(*dice.shape(0, 2), 3, 3)
        return {"self": x @ x.mT + 3 * torch.eye(3, dtype=torch.float64), **more}

    return draw


def _named(name: str, **more: Any) -> Way:
    return lambda dice: {(name if key == "self" else key): value for key, value in _matrix(**more)(dice).items()}


way("linalg_cholesky", "linalg_cholesky_ex", "linalg_eigvalsh", "linalg_matrix_exp",
    "inverse", "det", "logdet", "slogdet", "matrix_exp", "cholesky")(_matrix())  # fmt: skip
way("linalg_inv", "linalg_det", "linalg_slogdet", "linalg_eigh", "linalg_qr", "linalg_svd", "linalg_svdvals",
    "linalg_inv_ex", "linalg_lu_factor", "_linalg_det", "_linalg_slogdet")(_named("A"))  # fmt: skip
way("linalg_eigh")(_matrix())
way("linalg_pinv")(_matrix(rcond=1e-10))
way("linalg_matrix_rank")(_matrix(tol=1e-3))
way("linalg_matrix_power", "matrix_power")(_matrix(n=2))
way("linalg_eig", "linalg_eigvals")(_matrix())


@way("linalg_solve")
def _solve(dice: Dice) -> Arguments:
    a = _matrix()(dice)["self"]
    return {"A": a, "B": dice.real(*a.shape[:-2], 3, dice.size())}


@way("linalg_solve_triangular")
def _solve_triangular(dice: Dice) -> Arguments:
    a = _matrix()(dice)["self"]
    return {"self": a.triu(), "B": dice.real(*a.shape[:-2], 3, dice.size()), "upper": True}


@way("triangular_solve")
def _old_triangular_solve(dice: Dice) -> Arguments:
    a = _matrix()(dice)["self"]
    return {"self": dice.real(*a.shape[:-2], 3, dice.size()), "A": a.triu()}


@way("cholesky_solve")
def _cholesky_solve(dice: Dice) -> Arguments:
    a = _matrix()(dice)["self"]
    return {"self": dice.real(*a.shape[:-2], 3, dice.size()), "input2": torch.linalg.cholesky(a)}


@way("trace")
def _trace(dice: Dice) -> Arguments:
    return {"self": dice.real(*dice.shape(2, 2))}


@way("cross", "linalg_cross")
def _cross(dice: Dice) -> Arguments:
    lead = dice.shape(1, 2)
    return {"self": dice.real(*lead, 3), "other": dice.real(*lead, 3), "dim": -1}


def _recurrent(gates: int, states: int) -> Way:
    def draw(dice: Dice) -> Arguments:
        b, s, e, h, layers = dice.size(), dice.size(), 3, 2, dice.of(1, 2)
        both, first = dice.of(True, False), dice.of(True, False)
        ways = 2 if both else 1
        params = []
        for layer in range(layers):
            for _ in range(ways):
                into = e if layer == 0 else h * ways
                wide = gates * h
                params += [dice.real(wide, into), dice.real(wide, h), dice.real(wide), dice.real(wide)]
        hx = [dice.real(layers * ways, b, h) for _ in range(states)]
        x = dice.real(b, s, e) if first else dice.real(s, b, e)
        return {
            "input": x, "hx": hx if states > 1 else hx[0], "params": params, "has_biases": True, "num_layers": layers,
            "dropout": 0.0, "train": True, "bidirectional": both, "batch_first": first,
        }  # fmt: skip

    return draw


way("aten.lstm.input")(_recurrent(4, 2))
way("aten.gru.input")(_recurrent(3, 1))
way("aten.rnn_tanh.input", "aten.rnn_relu.input")(_recurrent(1, 1))


def _cell(gates: int, states: int) -> Way:
    def draw(dice: Dice) -> Arguments:
        b, e, h = dice.size(), 3, 2
        hx = [dice.real(b, h) for _ in range(states)]
        return {
            "input": dice.real(b, e), "hx": hx if states > 1 else hx[0], "w_ih": dice.real(gates * h, e),
            "w_hh": dice.real(gates * h, h), "b_ih": dice.real(gates * h), "b_hh": dice.real(gates * h),
        }  # fmt: skip

    return draw


way("aten.lstm_cell.default")(_cell(4, 2))
way("gru_cell")(_cell(3, 1))
way("rnn_tanh_cell", "rnn_relu_cell")(_cell(1, 1))


@way("diagonal", "diagonal_copy")
def _diagonal(dice: Dice) -> Arguments:
    return {"self": dice.real(*dice.shape(3, 4)), "offset": 0, "dim1": 0, "dim2": -1}


@way("linalg_diagonal")
def _linalg_diagonal(dice: Dice) -> Arguments:
    return {"A": dice.real(*dice.shape(3, 4))}


@way("diag_embed")
def _diag_embed(dice: Dice) -> Arguments:
    return {"self": dice.real(*dice.shape(1, 3)), "offset": dice.of(0, 1), "dim1": 0, "dim2": -1}


# Losses.


@way("aten.cross_entropy_loss.default")
def _cross_entropy(dice: Dice) -> Arguments:
    n, c, rest = dice.size(), dice.size(2), dice.shape(0, 1)
    soft = dice.of(True, False)
    target = dice.real(n, c, *rest).softmax(1) if soft else dice.ints(c, n, *rest)
    return {"self": dice.real(n, c, *rest), "target": target, "reduction": dice.of(0, 1, 2)}


@way("aten.nll_loss_nd.default")
def _nll(dice: Dice) -> Arguments:
    n, c, rest = dice.size(), dice.size(2), dice.shape(0, 1)
    return {"self": dice.real(n, c, *rest), "target": dice.ints(c, n, *rest), "reduction": dice.of(0, 1, 2)}


@way("aten.nll_loss.default")
def _nll_flat(dice: Dice) -> Arguments:
    n, c = dice.size(), dice.size(2)
    return {"self": dice.real(n, c), "target": dice.ints(c, n), "reduction": dice.of(0, 1, 2)}


def _elementwise(*, low: float | None = None, **more: Any) -> Way:
    def draw(dice: Dice) -> Arguments:
        shape = dice.shape(1, 3)
        pair = dice.real(*shape, low=low), dice.real(*shape, low=low)
        return {"self": pair[0], "target": pair[1], "reduction": dice.of(0, 1, 2), **more}

    return draw


way("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "hinge_embedding_loss")(_elementwise())
way("binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div")(_elementwise(low=0.1))


@way("poisson_nll_loss")
def _poisson(dice: Dice) -> Arguments:
    shape = dice.shape(1, 3)
    return {
        "input": dice.real(*shape), "target": dice.real(*shape, low=0.1), "log_input": True, "full": False, "eps": 1e-8,
        "reduction": dice.of(0, 1, 2),
    }  # fmt: skip


@way("margin_ranking_loss")
def _ranking(dice: Dice) -> Arguments:
    shape = dice.shape(1, 3)
    return {
        "input1": dice.real(*shape), "input2": dice.real(*shape), "target": dice.real(*shape), "margin": 0.1,
        "reduction": dice.of(0, 1, 2),
    }  # fmt: skip


@way("cosine_embedding_loss")
def _cosine_loss(dice: Dice) -> Arguments:
    n, d = dice.size(), 4
    return {
        "input1": dice.real(n, d), "input2": dice.real(n, d), "target": dice.ints(2, n) * 2 - 1,
        "reduction": dice.of(0, 1, 2),
    }  # fmt: skip


@way("triplet_margin_loss")
def _triplet(dice: Dice) -> Arguments:
    n, d = dice.size(), 4
    return {
        "anchor": dice.real(n, d), "positive": dice.real(n, d), "negative": dice.real(n, d),
        "reduction": dice.of(0, 1, 2),
    }  # fmt: skip


@way("multi_margin_loss")
def _multi_margin(dice: Dice) -> Arguments:
    n = dice.size()
    return {"self": dice.real(n, 4), "target": dice.ints(4, n), "reduction": dice.of(0, 1, 2)}


@way("multilabel_margin_loss")
def _multilabel(dice: Dice) -> Arguments:
    n = dice.size()
    target = torch.full((n, 4), -1)
    target[:, 0] = dice.ints(4, n)
    return {"self": dice.real(n, 4), "target": target, "reduction": dice.of(0, 1, 2)}


@way("cosine_similarity")
def _cosine(dice: Dice) -> Arguments:
    shape = dice.shape(2, 3)
    return {"x1": dice.real(*shape), "x2": dice.real(*shape), "dim": dice.dim(len(shape))}


@way("pairwise_distance")
def _pairwise(dice: Dice) -> Arguments:
    shape = dice.shape(2, 3)
    return {"x1": dice.real(*shape), "x2": dice.real(*shape), "keepdim": dice.of(True, False)}


# Lookups.


@way("embedding")
def _embedding(dice: Dice) -> Arguments:
    v = dice.size()
    return {"weight": dice.real(v, dice.size()), "indices": dice.ints(v, *dice.shape(1, 2))}


@way("aten.embedding_bag.default", "aten.embedding_bag.padding_idx", "aten._embedding_bag.default")
def _bag(dice: Dice) -> Arguments:
    v = dice.size()
    return {
        "weight": dice.real(v, dice.size()), "indices": dice.ints(v, 7), "offsets": torch.tensor([0, 2, 2, 5]),
        "mode": dice.of(0, 1), "scale_grad_by_freq": False,
    }  # fmt: skip


@way("aten.embedding_bag.padding_idx")
def _bag_padded(dice: Dice) -> Arguments:
    more = {"sparse": False, "per_sample_weights": None, "include_last_offset": False, "padding_idx": None}
    return {**_bag(dice), **more}


def _gathered(dice: Dice, exact: bool) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    shape = dice.shape(1, 3)
    dim = dice.dim(len(shape))
    index = [size if exact or dice.of(1, 1, 0) else dice.of(*range(1, size + 1)) for size in shape]
    index[dim] = dice.size()
    return shape, tuple(index), dim


@way("gather")
def _gather(dice: Dice) -> Arguments:
    shape, index, dim = _gathered(dice, False)
    return {"self": dice.real(*shape), "dim": dim, "index": dice.ints(shape[dim], *index)}


@way("take_along_dim")
def _take(dice: Dice) -> Arguments:
    shape, index, dim = _gathered(dice, True)
    return {"self": dice.real(*shape), "indices": dice.ints(shape[dim], *index), "dim": dim}


def _scattered(*, src: bool, unique: bool = True, **more: Any) -> Way:
    def draw(dice: Dice) -> Arguments:
        shape, index, dim = _gathered(dice, False)
        stored = list(index)
        if unique:  # a place that is written twice holds either
            stored[dim] = min(stored[dim], shape[dim])
            column = [-1 if at == dim % len(stored) else 1 for at in range(len(stored))]
            ids = dice.order(shape[dim])[: stored[dim]].view(column).expand(stored).contiguous()
        else:
            ids = dice.ints(shape[dim], *stored)
        actual: Arguments = {"self": dice.real(*shape), "dim": dim, "index": ids}
        return {**actual, **({"src": dice.real(*stored)} if src else {}), **more}

    return draw


way("aten.scatter.src")(_scattered(src=True))
way("aten.scatter.value")(_scattered(src=False, value=0.5))
way("aten.scatter_add.default")(_scattered(src=True, unique=False))
way("aten.scatter_reduce.two")(_scattered(src=True, unique=False, reduce="sum", include_self=True))
way("aten.scatter.reduce")(_scattered(src=True, reduce="add"))
way("aten.scatter.value_reduce")(_scattered(src=False, value=0.5, reduce="multiply"))


@way("index_select")
def _index_select(dice: Dice) -> Arguments:
    shape = dice.shape(1, 3)
    dim = dice.dim(len(shape))
    return {"self": dice.real(*shape), "dim": dim, "index": dice.ints(shape[dim], dice.size())}


def _rows_written(*, source: str = "", **more: Any) -> Way:
    def draw(dice: Dice) -> Arguments:
        shape = list(dice.shape(1, 3))
        dim = dice.dim(len(shape))
        count = dice.of(*range(1, shape[dim] + 1))
        actual: Arguments = {"self": dice.real(*shape), "dim": dim, "index": dice.order(shape[dim])[:count], **more}
        shape[dim] = count
        return {**actual, **({source: dice.real(*shape)} if source else {})}

    return draw


way("index_add", "index_copy")(_rows_written(source="source"))
way("aten.index_fill.int_Scalar")(_rows_written(value=0.5))


@way("aten.index_fill.int_Tensor")
def _index_fill(dice: Dice) -> Arguments:
    return {**_rows_written()(dice), "value": dice.real()}


def _indices(dice: Dice, shape: tuple[int, ...]) -> list[Any]:
    own = dice.shape(1, 2)
    values: list[Any] = [dice.of(True, False) for _ in shape]
    if not any(values):
        values[dice.of(*range(len(values)))] = True
    while not values[-1]:
        values.pop()
    return [dice.ints(size, *dice.stretched(own)) if use else None for use, size in zip(values, shape, strict=False)]


@way("aten.index.Tensor", "aten._unsafe_index.Tensor")
def _index(dice: Dice) -> Arguments:
    shape = dice.shape(1, 4)
    return {"self": dice.real(*shape), "indices": _indices(dice, shape)}


@way("index_put")
def _index_put(dice: Dice) -> Arguments:
    shape = dice.shape(1, 3)
    x, indices = dice.real(*shape), _indices(dice, shape)
    adds = dice.of(True, False)
    if not adds:  # a place that is written twice holds either
        indices = [dice.order(shape[0])[: dice.of(*range(1, shape[0] + 1))]]
    values = torch.ops.aten.index.Tensor(x, indices)
    stored = dice.stretched(values.shape)
    return {"self": x, "indices": indices, "values": dice.real(*stored), "accumulate": adds}


@way("one_hot")
def _one_hot(dice: Dice) -> Arguments:
    return {"self": dice.ints(5, *dice.shape(1, 3)), "num_classes": 5}


@way("masked_scatter")
def _masked_scatter(dice: Dice) -> Arguments:
    shape = dice.shape(1, 3)
    return {"self": dice.real(*shape), "mask": dice.bools(*shape), "source": dice.real(*shape)}


@way("aten.searchsorted.Tensor")
def _searchsorted(dice: Dice) -> Arguments:
    lead = dice.shape(0, 2)
    rows = lead if dice.of(True, False) else ()
    return {"sorted_sequence": dice.real(*rows, 5).sort(-1)[0], "self": dice.real(*lead, dice.size())}


@way("aten.bucketize.Tensor")
def _bucketize(dice: Dice) -> Arguments:
    return {"self": dice.real(*dice.shape(1, 3)), "boundaries": dice.real(5).sort()[0]}


@way("aten.isin.Tensor_Tensor")
def _isin(dice: Dice) -> Arguments:
    return {"elements": dice.ints(6, *dice.shape(1, 3)), "test_elements": dice.ints(6, 3)}


# Views.


@way("view", "_unsafe_view", "view_copy")
def _view(dice: Dice) -> Arguments:
    x, size = _reshaped(dice)
    return {"self": x, "size": size}


@way("reshape")
def _reshape(dice: Dice) -> Arguments:
    x, size = _reshaped(dice)
    return {"self": x, "shape": size}


@way("_reshape_copy")
def _reshape_copy(dice: Dice) -> Arguments:
    x, size = _reshaped(dice)
    return {"self": x, "size": size}


def _reshaped(dice: Dice) -> tuple[torch.Tensor, list[int]]:
    """A shape regrouped: factors taken together and apart, also where that makes a clash."""
    a, b, c, d = dice.size(), dice.size(), dice.size(), dice.of(1, 2)
    before = dice.of([a, b * c, d], [a * b, c, d], [a, b, c, d], [a * b * c * d])
    after = dice.of([a * b, c * d], [a, b, c * d], [a * b * c, d], [c * b, a, d], [a, b, c, 1, d])
    return dice.real(*before), after


@way("aten.flatten.using_ints")
def _flatten(dice: Dice) -> Arguments:
    return {"self": dice.real(*dice.shape(3, 4)), "start_dim": dice.of(0, 1), "end_dim": dice.of(1, 2, -1)}


@way("aten.unflatten.int")
def _unflatten(dice: Dice) -> Arguments:
    a, b = dice.size(), dice.size()
    return {"self": dice.real(dice.size(), a * b, 2), "dim": 1, "sizes": [a, b]}


@way("aten.squeeze.dim")
def _squeeze_dim(dice: Dice) -> Arguments:
    return {"self": dice.real(dice.size(), 1, dice.size()), "dim": 1}


@way("aten.squeeze.dims")
def _squeeze_dims(dice: Dice) -> Arguments:
    return {"self": dice.real(1, dice.size(), 1, dice.size()), "dim": [0, 2]}


@way("unsqueeze", "unsqueeze_copy")
def _unsqueeze(dice: Dice) -> Arguments:
    shape = dice.shape(1, 3)
    return {"self": dice.real(*shape), "dim": dice.dim(len(shape))}


@way("permute")
def _permute(dice: Dice) -> Arguments:
    shape = dice.shape(1, 4)
    return {"self": dice.real(*shape), "dims": dice.order(len(shape)).tolist()}


@way("aten.transpose.int")
def _transpose(dice: Dice) -> Arguments:
    shape = dice.shape(2, 4)
    return {"self": dice.real(*shape), "dim0": dice.dim(len(shape)), "dim1": dice.dim(len(shape))}


@way("t")
def _turned(dice: Dice) -> Arguments:
    return {"self": dice.real(*dice.shape(2, 2))}


@way("flip")
def _flip(dice: Dice) -> Arguments:
    shape = dice.shape(1, 3)
    return {"self": dice.real(*shape), "dims": dice.dims(len(shape))}


@way("roll")
def _roll(dice: Dice) -> Arguments:
    shape = dice.shape(1, 3)
    dims = dice.dims(len(shape))
    return {"self": dice.real(*shape), "shifts": [dice.of(1, 2, -1) for _ in dims], "dims": dims}


@way("rot90")
def _rot90(dice: Dice) -> Arguments:
    return {"self": dice.real(*dice.shape(2, 3)), "k": dice.of(1, 2, 3), "dims": [0, 1]}


@way("fliplr", "flipud")
def _mirror(dice: Dice) -> Arguments:
    return {"self": dice.real(*dice.shape(2, 3))}


@way("expand", "expand_copy", "broadcast_to")
def _expand(dice: Dice) -> Arguments:
    shape = dice.shape(1, 4)
    return {"self": dice.real(*dice.stretched(shape)), "size": list(shape)}


@way("repeat")
def _repeat(dice: Dice) -> Arguments:
    shape = dice.shape(1, 3)
    return {"self": dice.real(*shape), "repeats": [dice.of(1, 2, 3) for _ in range(len(shape) + dice.of(0, 1))]}


@way("tile")
def _tile(dice: Dice) -> Arguments:
    shape = dice.shape(1, 3)
    return {"self": dice.real(*shape), "dims": [dice.of(1, 2, 3) for _ in range(len(shape) + dice.of(0, 1))]}


@way("aten.repeat_interleave.self_int")
def _repeat_interleave(dice: Dice) -> Arguments:
    shape = dice.shape(1, 3)
    return {"self": dice.real(*shape), "repeats": dice.of(1, 2, 3), "dim": dice.of(*range(len(shape)))}


@way("aten.select.int")
def _select(dice: Dice) -> Arguments:
    shape = dice.shape(1, 3)
    return {"self": dice.real(*shape), "dim": dice.dim(len(shape)), "index": 0}


@way("aten.slice.Tensor")
def _slice(dice: Dice) -> Arguments:
    shape = list(dice.shape(1, 3))
    dim = dice.of(*range(len(shape)))
    shape[dim] *= dice.of(1, 2, 3)
    start = dice.of(*range(shape[dim]))
    return {
        "self": dice.real(*shape), "dim": dim, "start": start, "end": dice.of(*range(start + 1, shape[dim] + 1)),
        "step": dice.of(1, 1, 1, 2),
    }  # fmt: skip


@way("aten.split.Tensor")
def _split(dice: Dice) -> Arguments:
    shape = list(dice.shape(1, 3))
    dim = dice.of(*range(len(shape)))
    size = shape[dim]
    shape[dim] = size * dice.of(1, 2, 3) + dice.of(0, 0, 1)
    return {"self": dice.real(*shape), "split_size": size, "dim": dim}


@way("split_with_sizes")
def _split_sizes(dice: Dice) -> Arguments:
    a, b, c = dice.size(), dice.size(), dice.size()
    return {"self": dice.real(dice.size(), a + b + c, 2), "split_sizes": [a, b, c], "dim": 1}


@way("aten.unbind.int")
def _unbind(dice: Dice) -> Arguments:
    shape = dice.shape(1, 3)
    return {"self": dice.real(*shape), "dim": dice.dim(len(shape))}


@way("cat", "aten.concat.default")
def _cat(dice: Dice) -> Arguments:
    shape = list(dice.shape(1, 3))
    dim = dice.of(*range(len(shape)))
    equal = dice.of(True, False)
    parts = []
    for _ in range(dice.of(1, 2, 3)):
        shape[dim] = shape[dim] if equal else dice.size()
        parts.append(dice.real(*shape))
    return {"tensors": parts, "dim": dim}


@way("stack")
def _stack(dice: Dice) -> Arguments:
    shape = dice.shape(1, 3)
    return {"tensors": [dice.real(*shape) for _ in range(dice.of(1, 2, 3))], "dim": dice.dim(len(shape))}


@way("constant_pad_nd")
def _pad(dice: Dice) -> Arguments:
    widths = dice.of([1, 2], [0, 0, 1, 1], [2, 0])
    return {"self": dice.real(*dice.shape(2, 3)), "pad": widths, "value": dice.of(0, 1.5)}


@way("pad")
def _pad_by(dice: Dice) -> Arguments:
    mode = dice.of("constant", "reflect", "replicate")
    return {"self": dice.real(dice.size(), dice.size(), 5), "pad": [1, 2], "mode": mode}


@way("tril", "triu")
def _triangle(dice: Dice) -> Arguments:
    return {"self": dice.real(*dice.shape(2, 4)), "diagonal": dice.of(-1, 0, 1)}


@way("unfold", "unfold_copy")
def _unfold(dice: Dice) -> Arguments:
    shape = [dice.size(), dice.of(4, 6, 8, 9), dice.size()]
    return {"self": dice.real(*shape), "dimension": 1, "size": dice.of(2, 3), "step": dice.of(1, 2, 3)}


@way("slice_scatter")
def _slice_scatter(dice: Dice) -> Arguments:
    a, b = dice.size(), dice.size()
    return {"self": dice.real(a, 6, b), "src": dice.real(a, 3, b), "dim": 1, "start": 1, "end": 4}


@way("select_scatter")
def _select_scatter(dice: Dice) -> Arguments:
    a, b = dice.size(), dice.size()
    return {"self": dice.real(a, 6, b), "src": dice.real(a, b), "dim": 1, "index": 2}
