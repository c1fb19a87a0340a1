"""Ops over space: pooling, interpolation, padding, patches. Rows and channels are free, space stays whole."""

from __future__ import annotations

from collections.abc import Sequence

from ..rules.dims import label_dims, through, write_rule
from ..rules.notation import Rule
from ..rules.registry import OpCall
from ..rules.signature import Signature
from .contexts import LocalCall
from .printing import function, functional
from .spec import Kernel, define, input_work


def space_dims(call: OpCall, count: int) -> range:
    """The last `count` dims of the first input."""
    return range(len(call.shape) - count, len(call.shape))


def pool(call: OpCall) -> Rule:
    """A channel, a row at a time. The largest of a window is not linear, its mean is."""
    space = int(call.op.target.split("d.")[0].split("d_")[0][-1])
    return through(call, space_dims(call, space), linear="avg" in call.op.target)


def interpolate(call: OpCall) -> Rule:
    return through(call, range(2, len(call.shape)), linear=True)


def pad_by_values(call: OpCall) -> Rule:
    return through(call, space_dims(call, int(call.op.target.split("d.")[0][-1])), linear=True)


def pixel_shuffle(call: OpCall) -> Rule:
    """Channels are (c, r, r); rows of pixels are (h, r)."""
    r = call.op.argument("upscale_factor")
    *lead, channels, h, w = call.shape
    names, c = label_dims(lead, "b"), channels // r**2
    inside = [*names, _product("c", c, r * r), *_blocked_pair(h, w)]
    return write_rule([inside], [[*names, "c" if c > 1 else "1", str(h * r), str(w * r)]], [1]).with_sizes(_known(c=c))


def pixel_unshuffle(call: OpCall) -> Rule:
    r = call.op.argument("downscale_factor")
    *lead, c, h, w = call.shape
    names = label_dims(lead, "b")
    result = [*names, _product("c", c, r * r), *_blocked_pair(h // r, w // r)]
    return write_rule([[*names, "c" if c > 1 else "1", *_blocked_pair(h, w)]], [result], [1]).with_sizes(_known(c=c))


def channel_shuffle(call: OpCall) -> Rule:
    """Channels (groups, c) become (c, groups)."""
    groups = call.op.argument("groups")
    n, _, *space = label_dims(call.shape)
    c = call.shape[1] // groups
    before, after = (f"({groups} ch)", f"(ch {groups})") if c > 1 else (str(groups), str(groups))
    return write_rule([[n, before, *space]], [[n, after, *space]], [1]).with_sizes(_known(ch=c))


def im2col(call: OpCall) -> Rule:
    """Windows beside each other: channels become (c, window)."""
    window = _area(call.op.argument("kernel_size"))
    *lead, c, h, w = call.shape
    names = label_dims(lead, "b")
    places = str(call.outputs[0].shape[-1])
    inside = [*names, "c" if c > 1 else "1", *_blocked_pair(h, w)]
    return write_rule([inside], [[*names, _product("c", c, window), places]], [1]).with_sizes(_known(c=c))


def col2im(call: OpCall) -> Rule:
    window = _area(call.op.argument("kernel_size"))
    *lead, channels, places = call.shape
    names, c = label_dims(lead, "b"), channels // window
    result = [*names, "c" if c > 1 else "1", *map(str, call.outputs[0].shape[-2:])]
    return write_rule([[*names, _product("c", c, window), str(places)]], [result], [1]).with_sizes(_known(c=c))


def grid_sampler(call: OpCall) -> Rule:
    """Each row has its own grid; channels share it; the places asked for are free."""
    n, c = label_dims(call.shape[:2])
    grid = call.inputs[1].shape
    places = [name if size != 1 else "1" for name, size in zip(("x", "y", "z"), grid[1:-1], strict=False)]
    source = [n, c, *map(str, call.shape[2:])]
    return write_rule([source, [n, *places, str(grid[-1])]], [[n, c, *places]], [1])


def affine_grid(call: OpCall) -> Rule:
    n = label_dims(call.shape[:1])
    rule = write_rule([[*n, *map(str, call.shape[1:])]], [[*n, *map(str, call.outputs[0].shape[1:])]])
    return rule.with_local({"size.0": ("a",)}) if n == ["a"] else rule


def unpool(call: OpCall) -> Rule:
    names = label_dims(call.shape[: -2 if "2d" in call.op.target else -3])
    space = [str(size) for size in call.shape[len(names) :]]
    return write_rule([[*names, *space]] * 2, [[*names, *map(str, call.outputs[0].shape[len(names) :])]], [1])


def _product(name: str, size: int, other: int) -> str:
    return f"({name} {other})" if size > 1 else str(other)


def _blocked_pair(h: int, w: int) -> list[str]:
    return [str(h), str(w)]


def _known(**sizes: int) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if size > 1}


def _area(size: int | tuple[int, ...]) -> int:
    first, *rest = size if isinstance(size, tuple) else (size,)
    return first * (rest[0] if rest else first)


def saved_adaptive_pool(call: LocalCall, signature: Signature, flat: Sequence[bool] | None) -> str:
    """Of one pixel it is a mean."""
    return "" if tuple(call.op.argument("output_size")) == (1, 1) else "0"


def int64_indices(call: LocalCall, signature: Signature) -> float:
    """Where each maximum was."""
    return 8 * call.outputs[0].elements


POOL = {"rule": pool, "kernel": Kernel.POOLING}
define("max_pool1d max_pool2d max_pool3d", saved="0", prints=function, saved_extra=int64_indices, **POOL)
define("max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool1d "
       "adaptive_max_pool2d adaptive_max_pool3d", **POOL)  # fmt: skip
define("avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d", rule=pool, saved="0")
define("adaptive_avg_pool2d", rule=pool, saved=saved_adaptive_pool, result="pool",
       reads="F.adaptive_avg_pool2d(self, output_size)",
       prints=functional("adaptive_avg_pool2d", "self", "output_size"))  # fmt: skip
define("adaptive_avg_pool1d adaptive_avg_pool3d _adaptive_avg_pool3d", rule=pool)
define("max_unpool2d max_unpool3d", rule=unpool)

INTERPOLATE = {"rule": {"default vec": interpolate}, "work": input_work(1.0, 0.0)}
define("upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_bilinear2d", saved="", **INTERPOLATE)
define("_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d "
       "upsample_trilinear3d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa",
       **INTERPOLATE)  # fmt: skip
define("reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d",
       rule=pad_by_values)  # fmt: skip
define("pixel_shuffle", rule=pixel_shuffle, saved="")
define("pixel_unshuffle", rule=pixel_unshuffle, saved="")
define("channel_shuffle native_channel_shuffle", rule=channel_shuffle)
define("im2col", rule=im2col, saved="", work=(0.0, 1.0))
define("col2im", rule=col2im, saved="")
define("grid_sampler grid_sampler_2d grid_sampler_3d", rule=grid_sampler)
define("affine_grid_generator", rule=affine_grid)
