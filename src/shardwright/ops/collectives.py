"""Reshards, as lowering places them between ops (`comm.` ops)."""

from __future__ import annotations

from .contexts import RankRun, RuntimeArguments
from .printing import Printing, axes_text, plain, show_shard
from .spec import define

STATED = {
    "all_reduce_to_r": ("all_reduce", "dst"),
    "all_gather_to_r": ("all_gather", "dst"),
    "shard_from_r": ("shard", "src"),
}
"""Kinds of reshards that take a state: the collective, and the keyword of the state."""


def print_all_to_all(p: Printing) -> str:
    axes: tuple[str, ...] = p.literal("axes")
    shardings = [("gather_sharding", p.literal("sharding")), ("shard_sharding", p.literal("to_sharding"))]
    extra = "".join(f", {key}={show_shard(shard)}" for key, shard in shardings if not plain(shard, p.many(axes)))
    return f"comm.all_to_all({p.names[0]}, {p['dim']}, {p['to_dim']}, {axes_text(axes)}{extra})"


def print_reduce(p: Printing) -> str:
    return f"comm.all_reduce({p.names[0]}, {axes_text(p.literal('axes'))}, op={p['op']})"


def print_reshard(p: Printing) -> str:
    kind = p.op.target.removeprefix("comm.")
    axes: tuple[str, ...] = p.literal("axes")
    group, x = axes_text(axes), p.names[0]
    if p.literal("later"):
        return f"runtime.all_reduce_pending({x}, {group})"
    function, keyword = STATED.get(kind, (kind, ""))
    state = f", {keyword}=R" if keyword else ""
    if p.literal("dim") is None:
        return f"comm.{function}{'_' if p.literal('in_place') else ''}({x}, {group}{state})"
    sharding = p.literal("sharding")
    extra = "" if plain(sharding, p.many(axes)) else f", {show_shard(sharding)}"
    return f"comm.{function}({x}, {p['dim']}, {group}{extra}{state})"


def run_all_to_all(run: RankRun, a: RuntimeArguments) -> object:
    group = run.group(a["axes"])
    return run.comm.all_to_all(a.tensors[0], a["dim"], a["to_dim"], group, a["sharding"], a["to_sharding"])


def run_reduce(run: RankRun, a: RuntimeArguments) -> object:
    return run.comm.all_reduce(a.tensors[0], run.group(a["axes"]), op=a["op"])


def run_reshard(run: RankRun, a: RuntimeArguments) -> object:
    x, group = a.tensors[0], run.group(a["axes"])
    if a["in_place"]:
        return run.comm.all_reduce_(x.clone(), group)  # the value before it is kept here
    kind = a.op.target.removeprefix("comm.")
    function, keyword = STATED.get(kind, (kind, ""))
    where = (group,) if a["dim"] is None else (a["dim"], group, a["sharding"])
    return getattr(run.comm, function)(x, *where, **({keyword: run.comm.R} if keyword else {}))


RESHARD = {"prints": print_reshard, "runs": run_reshard}
for _kind in ("all_reduce", "replicate", "partial", "invariant"):
    define(f"comm.{_kind}", reads=f"comm.{_kind}(x, axes)", **RESHARD)
for _kind in ("all_gather", "shard", "reduce_scatter", "zero_pad"):
    define(f"comm.{_kind}", reads=f"comm.{_kind}(x, dim, axes, sharding)", **RESHARD)
define("comm.all_reduce_to_r", reads="comm.all_reduce(x, axes, dst)", positional=2, state="dst", **RESHARD)
define("comm.all_gather_to_r", reads="comm.all_gather(x, dim, axes, sharding, dst)", positional=4, state="dst",
       **RESHARD)  # fmt: skip
define("comm.shard_from_r", reads="comm.shard(x, dim, axes, sharding, src)", positional=4, state="src", **RESHARD)
define("comm.reduce", prints=print_reduce, reads="comm.all_reduce(x, axes, op)", positional=2, runs=run_reduce)
define("comm.all_to_all", prints=print_all_to_all, runs=run_all_to_all, positional=4,
       reads="comm.all_to_all(x, dim, to_dim, axes, sharding, to_sharding)",
       keywords={"gather_sharding": "sharding", "shard_sharding": "to_sharding"})  # fmt: skip
