"""Ops that mix what they look along: Fourier transforms, matrices as a whole, recurrent nets."""

from __future__ import annotations

from ..rules.dims import label_dims, through, write_rule
from ..rules.notation import Rule
from ..rules.registry import OpCall
from .contexts import TracedCall
from .spec import define


def fft(call: OpCall) -> Rule:
    return through(call, {call.dim("dim", -1)}, linear=True)


def fft_of_several(call: OpCall) -> Rule:
    two = call.op.argument("dim", (-2, -1)) if "2." in call.op.target else call.op.argument("dim")
    sizes = call.op.argument("s")
    if two is None:  # the last ones that sizes are given for, or all
        two = tuple(range(-len(sizes), 0)) if sizes else tuple(range(len(call.shape)))
    return through(call, {dim % len(call.shape) for dim in two}, linear=True)


def fft_shift(call: OpCall) -> Rule:
    return through(call, set(call.dims()), linear=True)


def stft(call: OpCall) -> Rule:
    """Signals are free; frequencies and frames take the place of time."""
    lead = label_dims(call.shape[:-1])
    result = [*lead, *map(str, call.outputs[0].shape[len(lead) :])]
    return write_rule([[*lead, str(call.shape[-1])], *[["?"]] * (len(call.inputs) - 1)], [result], [1])


def istft(call: OpCall) -> Rule:
    lead = label_dims(call.outputs[0].shape[:-1])
    source = [*lead, *map(str, call.shape[len(lead) :])]
    return write_rule([source, *[["?"]] * (len(call.inputs) - 1)], [[*lead, str(call.outputs[0].shape[-1])]], [1])


def matrix(call: OpCall) -> Rule | None:
    """Each matrix by itself: leading dims are free if all tensors share them."""
    lead = call.shape[:-2]
    if any(value.shape[: len(lead)] != lead for value in (*call.inputs, *call.outputs)):
        return None
    names = label_dims(lead)

    def term(shape: tuple[int, ...]) -> list[str]:
        return [*names, *map(str, shape[len(lead) :])]

    return write_rule([term(value.shape) for value in call.inputs], [term(value.shape) for value in call.outputs])


def trace(call: OpCall) -> Rule:
    return write_rule([[str(size) for size in call.shape]], [[]], [1])


def cross(call: OpCall) -> Rule | None:
    """Three numbers at a time. Without a dim `torch.cross` looks for the first of size three, which has no rule."""
    sought = call.op.argument("dim") is None and "linalg" not in call.op.target
    if sought or any(value.shape != call.shape for value in call.inputs):
        return None
    dim, names = call.dim("dim", -1), label_dims(call.shape)
    names[dim] = "3"
    return write_rule([names, names], [names], [1, 2])


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


def cell(call: OpCall) -> Rule | None:
    if len(call.shape) != 2:
        return None
    states = 2 if "lstm" in call.op.target else 1
    rows = label_dims(call.shape[:1])
    inputs = [[*rows, str(value.shape[1])] for value in call.inputs[: 1 + states]]
    inputs += [[str(size) for size in value.shape] for value in call.inputs[1 + states :]]
    return write_rule(inputs, [[*rows, str(value.shape[1])] for value in call.outputs])


def canonical_cross(call: TracedCall) -> list[str]:
    """Without a dim it is the first of size 3, which on a shard might be another one."""
    if call.arguments.get("dim") is not None:
        return call.keep()
    return call.emit(**call.arguments | {"dim": call.info.shape.index(3)})


define("fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft", rule=fft)
define("fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_fftn fft_ifftn fft_rfftn fft_irfftn", rule=fft_of_several)
define("fft_fftshift fft_ifftshift", rule=fft_shift)
define("stft", rule={"default center": stft})
define("istft", rule=istft)
define("linalg_inv linalg_det linalg_slogdet linalg_cholesky linalg_cholesky_ex linalg_eigh linalg_eigvalsh linalg_qr "
       "linalg_svd linalg_svdvals linalg_pinv linalg_matrix_exp linalg_matrix_power linalg_matrix_rank linalg_inv_ex "
       "inverse det logdet slogdet matrix_exp matrix_power cholesky linalg_lu_factor _linalg_det _linalg_slogdet "
       "linalg_eigvals linalg_eig linalg_solve linalg_solve_triangular cholesky_solve triangular_solve",
       rule=matrix)  # fmt: skip
define("trace", rule=trace)
define("cross", rule=cross, canonical=canonical_cross)
define("linalg_cross", rule=cross)
define("lstm gru rnn_tanh rnn_relu", rule={"input": recurrent})
define("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell", rule=cell)
