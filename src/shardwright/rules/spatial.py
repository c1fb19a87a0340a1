"""Ops over space: pooling, interpolation, padding, patches. Rows and channels are free, space stays whole."""

from __future__ import annotations

from .dims import label_dims, through, write_rule
from .notation import Rule
from .registry import OpCall, rule


def space_dims(call: OpCall, count: int) -> range:
    """The last `count` dims of the first input."""
    return range(len(call.shape) - count, len(call.shape))


POOLS = (
    "max_pool{n}d max_pool{n}d_with_indices avg_pool{n}d adaptive_avg_pool{n}d _adaptive_avg_pool{n}d "
    "adaptive_max_pool{n}d"
)
NEAREST = "upsample_nearest{n}d _upsample_nearest_exact{n}d"
PADS = "reflection_pad{n}d replication_pad{n}d"
SMOOTH = (
    "upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d _upsample_bilinear2d_aa "
    "_upsample_bicubic2d_aa"
)


@rule(*(name for n in "123" for name in POOLS.format(n=n).split() if name != "_adaptive_avg_pool1d"))
def pool(call: OpCall) -> Rule:
    """A channel, a row at a time. The largest of a window is not linear, its mean is."""
    space = int(call.op.target.split("d.")[0].split("d_")[0][-1])
    return through(call, space_dims(call, space), linear="avg" in call.op.target)


@rule(
    *(f"aten.{name}.{form}" for n in "123" for name in NEAREST.format(n=n).split() for form in ("default", "vec")),
    *(f"aten.{name}.{form}" for name in SMOOTH.split() for form in ("default", "vec")),
)
def interpolate(call: OpCall) -> Rule:
    return through(call, range(2, len(call.shape)), linear=True)


@rule(*(name for n in "123" for name in PADS.format(n=n).split()))
def pad_by_values(call: OpCall) -> Rule:
    return through(call, space_dims(call, int(call.op.target.split("d.")[0][-1])), linear=True)


@rule("pixel_shuffle")
def pixel_shuffle(call: OpCall) -> Rule:
    """Channels are (c, r, r); rows of pixels are (h, r)."""
    r = call.op.argument("upscale_factor")
    *lead, channels, h, w = call.shape
    names, c = label_dims(lead, "b"), channels // r**2
    inside = [*names, _product("c", c, r * r), *_blocked_pair(h, w)]
    return write_rule([inside], [[*names, "c" if c > 1 else "1", str(h * r), str(w * r)]], [1]).with_sizes(_known(c=c))


@rule("pixel_unshuffle")
def pixel_unshuffle(call: OpCall) -> Rule:
    r = call.op.argument("downscale_factor")
    *lead, c, h, w = call.shape
    names = label_dims(lead, "b")
    result = [*names, _product("c", c, r * r), *_blocked_pair(h // r, w // r)]
    return write_rule([[*names, "c" if c > 1 else "1", *_blocked_pair(h, w)]], [result], [1]).with_sizes(_known(c=c))


@rule("channel_shuffle", "native_channel_shuffle")
def channel_shuffle(call: OpCall) -> Rule:
    """Channels (groups, c) become (c, groups)."""
    groups = call.op.argument("groups")
    n, _, *space = label_dims(call.shape)
    c = call.shape[1] // groups
    before, after = (f"({groups} ch)", f"(ch {groups})") if c > 1 else (str(groups), str(groups))
    return write_rule([[n, before, *space]], [[n, after, *space]], [1]).with_sizes(_known(ch=c))


@rule("im2col")
def im2col(call: OpCall) -> Rule:
    """Windows beside each other: channels become (c, window)."""
    window = _area(call.op.argument("kernel_size"))
    *lead, c, h, w = call.shape
    names = label_dims(lead, "b")
    places = str(call.outputs[0].shape[-1])
    inside = [*names, "c" if c > 1 else "1", *_blocked_pair(h, w)]
    return write_rule([inside], [[*names, _product("c", c, window), places]], [1]).with_sizes(_known(c=c))


@rule("col2im")
def col2im(call: OpCall) -> Rule:
    window = _area(call.op.argument("kernel_size"))
    *lead, channels, places = call.shape
    names, c = label_dims(lead, "b"), channels // window
    result = [*names, "c" if c > 1 else "1", *map(str, call.outputs[0].shape[-2:])]
    return write_rule([[*names, _product("c", c, window), str(places)]], [result], [1]).with_sizes(_known(c=c))


@rule("grid_sampler", "grid_sampler_2d", "grid_sampler_3d")
def grid_sampler(call: OpCall) -> Rule:
    """Each row has its own grid; channels share it; the places asked for are free."""
    n, c = label_dims(call.shape[:2])
    grid = call.inputs[1].shape
    places = [name if size != 1 else "1" for name, size in zip(("x", "y", "z"), grid[1:-1], strict=False)]
    source = [n, c, *map(str, call.shape[2:])]
    return write_rule([source, [n, *places, str(grid[-1])]], [[n, c, *places]], [1])


@rule("affine_grid_generator")
def affine_grid(call: OpCall) -> Rule:
    n = label_dims(call.shape[:1])
    rule = write_rule([[*n, *map(str, call.shape[1:])]], [[*n, *map(str, call.outputs[0].shape[1:])]])
    return rule.with_local({"size.0": ("a",)}) if n == ["a"] else rule


@rule("max_unpool2d", "max_unpool3d")
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
