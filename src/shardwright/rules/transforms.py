"""Ops that mix what they look along: Fourier transforms, matrices as a whole, recurrent nets."""

from __future__ import annotations

from .dims import blocked, label_dims, through, write_rule
from .notation import Rule
from .registry import OpCall, rule


@rule("fft_fft", "fft_ifft", "fft_rfft", "fft_irfft", "fft_hfft", "fft_ihfft")
def fft(call: OpCall) -> Rule:
    return through(call, {call.dim("dim", -1)}, linear=True)


@rule("fft_fft2", "fft_ifft2", "fft_rfft2", "fft_irfft2", "fft_fftn", "fft_ifftn", "fft_rfftn", "fft_irfftn")
def fft_of_several(call: OpCall) -> Rule:
    two = call.op.argument("dim", (-2, -1)) if "2." in call.op.target else call.op.argument("dim")
    sizes = call.op.argument("s")
    if two is None:  # the last ones that sizes are given for, or all
        two = tuple(range(-len(sizes), 0)) if sizes else tuple(range(len(call.shape)))
    return through(call, {dim % len(call.shape) for dim in two}, linear=True)


@rule("fft_fftshift", "fft_ifftshift")
def fft_shift(call: OpCall) -> Rule:
    return through(call, set(call.dims()), linear=True)


@rule("aten.stft.default", "aten.stft.center")
def stft(call: OpCall) -> Rule:
    """Signals are free; frequencies and frames take the place of time."""
    lead = label_dims(call.shape[:-1])
    result = [*lead, *map(str, call.outputs[0].shape[len(lead) :])]
    return write_rule([[*lead, str(call.shape[-1])], *[["?"]] * (len(call.inputs) - 1)], [result], [1])


@rule("istft")
def istft(call: OpCall) -> Rule:
    lead = label_dims(call.outputs[0].shape[:-1])
    source = [*lead, *map(str, call.shape[len(lead) :])]
    return write_rule([source, *[["?"]] * (len(call.inputs) - 1)], [[*lead, str(call.outputs[0].shape[-1])]], [1])


@rule("view_as_real", "view_as_complex", "aten.view_as_real_copy.default")
def complex_view(call: OpCall) -> Rule:
    """A last dim of two is the number's own."""
    real = "as_real" in call.op.target
    names = label_dims(call.shape if real else call.outputs[0].shape)
    return write_rule([names if real else [*names, "2"]], [[*names, "2"] if real else names], [1])


MATRICES = (
    "linalg_inv linalg_det linalg_slogdet linalg_cholesky linalg_cholesky_ex linalg_eigh linalg_eigvalsh linalg_qr "
    "linalg_svd linalg_svdvals linalg_pinv linalg_matrix_exp linalg_matrix_power linalg_matrix_rank linalg_inv_ex "
    "inverse det logdet slogdet matrix_exp matrix_power cholesky linalg_lu_factor _linalg_det _linalg_slogdet "
    "linalg_eigvals linalg_eig"
)


@rule(*MATRICES.split(), "linalg_solve", "linalg_solve_triangular", "cholesky_solve", "triangular_solve")
def matrix(call: OpCall) -> Rule | None:
    """Each matrix by itself: leading dims are free if all tensors share them."""
    lead = call.shape[:-2]
    if any(value.shape[: len(lead)] != lead for value in (*call.inputs, *call.outputs)):
        return None
    names = label_dims(lead)

    def term(shape: tuple[int, ...]) -> list[str]:
        return [*names, *map(str, shape[len(lead) :])]

    return write_rule([term(value.shape) for value in call.inputs], [term(value.shape) for value in call.outputs])


@rule("trace")
def trace(call: OpCall) -> Rule:
    return write_rule([[str(size) for size in call.shape]], [[]], [1])


@rule("cross", "linalg_cross")
def cross(call: OpCall) -> Rule | None:
    """Three numbers at a time. Without a dim `torch.cross` looks for the first of size three, which has no rule."""
    sought = call.op.argument("dim") is None and "linalg" not in call.op.target
    if sought or any(value.shape != call.shape for value in call.inputs):
        return None
    dim, names = call.dim("dim", -1), label_dims(call.shape)
    names[dim] = "3"
    return write_rule([names, names], [names], [1, 2])


@rule("aten.lstm.input", "aten.gru.input", "aten.rnn_tanh.input", "aten.rnn_relu.input")
def recurrent(call: OpCall) -> Rule | None:
    """Rows are free. Steps follow each other, and gates are mixed inside."""
    if len(call.shape) != 3:
        return None
    first = bool(call.op.argument("batch_first", False))
    rows = "b" if call.shape[0 if first else 1] > 1 else "1"
    steps = [rows, "s^"] if first else ["s^", rows]
    states = 2 if "lstm" in call.op.target else 1
    inputs = [[*steps, str(call.shape[2])]]
    inputs += [[str(value.shape[0]), rows, str(value.shape[2])] for value in call.inputs[1 : 1 + states]]
    inputs += [[str(size) for size in value.shape] for value in call.inputs[1 + states :]]
    outputs = [[*steps, str(call.outputs[0].shape[2])]]
    outputs += [[str(value.shape[0]), rows, str(value.shape[2])] for value in call.outputs[1:]]
    return write_rule(inputs, outputs)


@rule("aten.lstm_cell.default", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
def cell(call: OpCall) -> Rule | None:
    if len(call.shape) != 2:
        return None
    states = 2 if "lstm" in call.op.target else 1
    rows = label_dims(call.shape[:1])
    inputs = [[*rows, str(value.shape[1])] for value in call.inputs[: 1 + states]]
    inputs += [[str(size) for size in value.shape] for value in call.inputs[1 + states :]]
    return write_rule(inputs, [[*rows, str(value.shape[1])] for value in call.outputs])


@rule("diagonal", "diagonal_copy", "linalg_diagonal")
def diagonal(call: OpCall) -> Rule:
    """The two dims go, and a new one comes last."""
    default = (-2, -1) if "linalg" in call.op.target else (0, 1)
    gone = {call.dim("dim1", default[0]), call.dim("dim2", default[1])}
    names = label_dims(call.shape)
    source = [blocked(name) if at in gone else name for at, name in enumerate(names)]
    kept = [name for at, name in enumerate(names) if at not in gone]
    return write_rule([source], [[*kept, str(call.outputs[0].shape[-1])]], [1])


@rule("diag_embed")
def diag_embed(call: OpCall) -> Rule:
    rank = len(call.shape) + 1
    new = {call.dim("dim1", -2, rank), call.dim("dim2", -1, rank)}
    names = label_dims(call.shape)
    rest = iter(names[:-1])
    result = [str(size) if at in new else next(rest) for at, size in enumerate(call.outputs[0].shape)]
    return write_rule([[*names[:-1], str(call.shape[-1])]], [result], [1])
