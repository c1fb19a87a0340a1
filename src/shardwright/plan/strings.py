"""Plan strings: "dp=2,tp=2", "dp=2,tp=2,recompute", or with a pipeline:

"pp=2"                  two stages of one device
"pp=2,dp=2,zb"          two stages of two devices each, by the schedule zb
"pp=1+3,dp"             two stages, of one and of three devices; dp takes what a stage has
"pp=2,interleaved=3"    three virtual stages per pipeline rank
"pp=2,cut=layers.4"     the second stage begins with layers.4 (of several: cut=layers.4+layers.8)
"dp=2,recompute=layers.0+layers.1"      activation checkpointing of these modules, instead of all layers
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..errors import PlanError, ScheduleError, meant
from ..layout import MOST_DEVICES, Axis, Mesh
from ..rules.replica_axes import REPLICAS
from ..schedule import KINDS, ScheduleKind, schedule_kind, schedule_names
from ..storage import SHARDED_KINDS

SHARDED = tuple(kind.name for kind in SHARDED_KINDS)
"""Policies that are data parallel with parameters sharded for storage: "zero1", ..."""
CONTEXT = ("cp", "cp_all_gather", "ulysses")
"""Policies that split the sequence (context parallelism): ring attention, gathered keys, heads exchanged."""
KNOWN = ("dp", "tp", "sp", "ep", *CONTEXT, *SHARDED)
AUTO = "auto"
RECOMPUTE = "recompute"
"""Asks for activation checkpointing of every repeated layer, or of the modules that it names."""
CUT = "cut"
"""Names the modules that a stage begins with."""
CHUNKED_LOSS = "chunked_loss"
"""Asks for logits in chunks of rows, in as many as are usual, or with a number in so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRequest:
    """Which policy on which axis, in the order of the mesh, and whether layers are recomputed.

    stages      of a pipeline: how many devices each stage has; () if there is none
    free        the policy that takes all devices of a stage, where stages differ
    chunked_loss  in how many chunks losses make their logits: None: at once, 0: as many as are usual
    cuts        modules that a stage begins with
    recomputed  modules that are recomputed, where it is not all layers
    refined     axes that are several, by the sizes of these, outermost first: ("tp", (2, 2)) is tp0=2 x tp1=2
    """

    parts: tuple[tuple[str, Axis], ...]
    recompute: bool = False
    stages: tuple[int, ...] = ()
    free: str = ""
    schedule: ScheduleKind | None = None
    refined: tuple[tuple[str, tuple[int, ...]], ...] = ()
    chunked_loss: int | None = None
    cuts: tuple[str, ...] = ()
    recomputed: tuple[str, ...] = ()

    @property
    def mesh(self) -> Mesh:
        """The mesh of all devices, or of the first stage."""
        return self.mesh_of(self.stages[0] if self.stages else 0)

    def mesh_of(self, size: int) -> Mesh:
        """The mesh of a stage of so many devices."""
        return Mesh(axes=tuple(axis for _, axis in self.parts_of(size)))

    @property
    def size(self) -> int:
        return sum(self.stages) if self.stages else self.mesh.size

    def parts_of(self, size: int) -> tuple[tuple[str, Axis], ...]:
        """The policies of a stage of so many devices, with the axes that it has."""
        return tuple((policy, axis) for policy, unrefined in self.asked_of(size) for axis in self._subaxes(unrefined))

    def asked_of(self, size: int) -> tuple[tuple[str, Axis], ...]:
        """The policies of a stage of so many devices, as they were asked for."""
        if not self.free:
            return self.parts
        return () if size == 1 else ((self.free, Axis(name=axis_name(self.free, ()), size=size)),)

    def _subaxes(self, axis: Axis) -> tuple[Axis, ...]:
        for name, sizes in self.refined:
            if name == axis.name and math.prod(sizes) == axis.size:
                return subaxes(axis, sizes)
        return (axis,)

    def check_size(self, world: int) -> None:
        """Refuse another number of devices than the request is for."""
        if self.size != world:
            raise PlanError(
                f"the plan '{self}' is for {self.size} devices, but there are {world} processes; "
                f"start {self.size} (torchrun --nproc-per-node={self.size}) or change the plan"
            )

    def like(self, mesh: Mesh) -> PolicyRequest:
        """The same request, with its axes refined as those of a mesh are."""
        sizes_of: dict[str, list[int]] = {}
        for axis in mesh.axes:
            if (named := SUBAXIS.fullmatch(axis.name)) is not None:
                sizes_of.setdefault(named[1], []).append(axis.size)
        return replace(self, refined=tuple((name, tuple(sizes)) for name, sizes in sizes_of.items()))

    def __str__(self) -> str:
        parts = [f"{policy}={axis.size}" for policy, axis in self.parts]
        if self.stages:
            even = len(set(self.stages)) == 1 and not self.free
            parts.insert(0, f"pp={len(self.stages) if even else '+'.join(map(str, self.stages))}")
            parts += [word for word in (self.free, self.schedule and self.schedule.name) if word]
        parts = [*(parts or ["single"]), *([RECOMPUTE] if self.recompute else [])]
        modules = ((CUT, self.cuts), (RECOMPUTE, self.recomputed))
        parts += [f"{word}={'+'.join(names)}" for word, names in modules if names]
        if self.chunked_loss is not None:
            parts.append(f"{CHUNKED_LOSS}={self.chunked_loss}" if self.chunked_loss else CHUNKED_LOSS)
        return ",".join(parts)


SUBAXIS = re.compile("(tp|sp)([0-9]+)")
"""What the parts of an axis are called: tp0 and tp1 are tp, tp0 the outer one."""


def subaxes(axis: Axis, sizes: Sequence[int]) -> tuple[Axis, ...]:
    """An axis as several of these sizes, outermost first: neighbours on it are neighbours on the last."""
    return tuple(Axis(name=f"{axis.name}{at}", size=size) for at, size in enumerate(sizes))


def outer_of(axis: str, mesh: Mesh) -> Axis | None:
    """The axis outside of an inner part of a refined axis: tp0 of tp1."""
    named = SUBAXIS.fullmatch(axis)
    if named is None or int(named[2]) == 0 or f"{named[1]}0" not in mesh.names:
        return None
    return mesh.axis(f"{named[1]}{int(named[2]) - 1}")


def axis_name(policy: str, used: Iterable[str]) -> str:
    """What the axis of a policy is called: ZeRO is a kind of dp, sp a kind of tp."""
    name = "dp" if policy in SHARDED else "tp" if policy == "sp" else "cp" if policy in CONTEXT else policy
    return policy if name in tuple(used) else name


ELSEWHERE = {
    "ddp": "dp", "data": "dp", "fsdp": "zero3", "fsdp1": "zero3", "fsdp2": "zero3", "full_shard": "zero3",
    "shard_grad_op": "zero2", "mp": "tp", "tensor": "tp", "sequence": "sp", "megatron": "sp", "ring": "cp",
    "context": "cp", "expert": "ep", "pipeline": "pp", "checkpoint": "recompute", "checkpointing": "recompute",
    "remat": "recompute", "none": "single", "one": "single",
}  # fmt: skip
"""Words of other libraries, with ours."""


def _advice(word: str, number: str, names: Sequence[str]) -> str:
    """What somebody who wrote an unknown word probably wants, as the end of a sentence."""
    word = word.lower()
    if word == "hsdp":
        return "; replicas of fully sharded groups are two axes here: 'dp=2,zero3=4'"
    if word == "zero":
        stage = number if number in ("1", "2", "3") else "3"
        return f"; the stage is a part of the word, and the number that of ranks: 'zero{stage}=8'"
    if word == AUTO:
        return "; auto decides everything and stands alone; to decide some of it use constraints (docs/constraints.md)"
    split = re.fullmatch(r"([a-z]+[123]?)[:x]?(\d+)", word) if not number else None
    if split is not None and split[1] in names:
        return f"; did you mean '{split[1]}={split[2]}'?"
    ours = ELSEWHERE.get(word) or (word if word in names else None)
    if ours is not None:
        return f"; that is {ours!r} here: '{ours}{f'={number or 2}' if ours in (*names, 'pp') else ''}'"
    return meant(word, (*names, "pp", RECOMPUTE, CHUNKED_LOSS, *KINDS))


def plan_text(request: Mapping[str, object]) -> str:
    """A plan string from a dict: {"dp": 2, "tp": 2, "recompute": True}, {"pp": 4, "schedule": "zb"}."""
    items = []
    for word, value in request.items():
        if word == "schedule":
            items.append(str(value))
        elif value is True or value is None:
            items.append(str(word))
        elif value is not False:
            items.append(f"{word}={value}")
    return ",".join(items)


def parse_plan_string(text: str, names: tuple[str, ...] = KNOWN) -> PolicyRequest:
    """Read a plan string."""
    parts: list[tuple[str, Axis]] = []
    items = text.replace(" ", "").split(",")
    stages: tuple[int, ...] = ()
    schedule: ScheduleKind | None = None
    free = ""
    chunked_loss: int | None = None
    modules: dict[str, tuple[str, ...]] = {}
    _check_once(text, items)
    for item in items:
        policy, equals, number = item.partition("=")
        if item in ("", "single", RECOMPUTE):
            continue
        if policy == CHUNKED_LOSS:
            chunked_loss = _chunks(text, number if equals else "0")
        elif _schedule_word(item) in KINDS:
            schedule = _schedule(text, item)
        elif policy in (CUT, RECOMPUTE) and equals:
            modules[policy] = _modules(text, policy, number)
        elif policy == "pp":
            stages = _stages(text, number)
        elif not equals and len(stages) > 1 and policy in names and len(set(stages)) > 1:
            if free:
                raise PlanError(f"the plan {text!r} gives unequal stages {free} and {policy}; they take one policy")
            free = policy
        else:
            _check_part(text, item, names, parts)
            parts.append((policy, Axis(name=axis_name(policy, (a.name for _, a in parts)), size=int(number))))
    # replicas outside, then experts and the sequence; tensor parallelism is between neighbours
    parts.sort(key=lambda part: (part[0] not in REPLICAS, part[0] == "ep", part[0] not in (*REPLICAS, *CONTEXT)))
    inner = math.prod(axis.size for _, axis in parts)
    if stages and max(stages) == 1:
        stages = (inner,) * len(stages)
    request = PolicyRequest(
        parts=tuple(parts), recompute=RECOMPUTE in items, stages=stages, free=free, schedule=schedule,
        chunked_loss=chunked_loss, cuts=modules.get(CUT, ()), recomputed=modules.get(RECOMPUTE, ()),
    )  # fmt: skip
    _check_stages(text, request)
    return request


def _check_once(text: str, items: Sequence[str]) -> None:
    named = [word for word in map(_schedule_word, items) if word in KINDS]
    for word in ("pp", CHUNKED_LOSS, CUT, RECOMPUTE):
        if [item.partition("=")[0] for item in items].count(word) > 1:
            raise PlanError(f"the plan {text!r} names {word} twice")
    if len(named) > 1:
        raise PlanError(f"the plan {text!r} names the schedules {', '.join(named)}; a pipeline has one")


def _check_part(text: str, item: str, names: tuple[str, ...], parts: Sequence[tuple[str, Axis]]) -> None:
    policy, equals, number = item.partition("=")
    if policy not in names:
        known = ", ".join((*names, "pp", CUT, RECOMPUTE, CHUNKED_LOSS, schedule_names()))
        advice = _advice(policy, number, names).removesuffix("?")
        raise PlanError(f"the plan {text!r} asks for {policy!r}{advice}; known are {known}, as in 'dp=2,tp=2'")
    if number.isdigit() and (len(number) > 9 or int(number) > MOST_DEVICES):
        raise PlanError(f"the plan {text[:100]!r} gives {policy} {number[:20]} devices; there may be {MOST_DEVICES}")
    if not equals or not number.isdigit():
        raise PlanError(f"the plan {text!r} does not say how many devices {policy} has; write {policy}=2")
    if int(number) < 2:
        raise PlanError(f"the plan {text!r} gives {policy} {number} device(s); leave an axis out if it has just one")
    if any(policy == other for other, _ in parts):
        raise PlanError(f"the plan {text!r} names {policy} twice")


def _modules(text: str, word: str, names: str) -> tuple[str, ...]:
    modules = tuple(names.split("+"))
    if not all(MODULE.fullmatch(name) for name in modules):
        raise PlanError(
            f"the plan {text!r} does not say which modules {word} is about; write {word}=layers.4+layers.8"
            + (f", or {RECOMPUTE} alone for all layers" if word == RECOMPUTE else "")
        )
    return modules


MODULE = re.compile(r"[\w*?]+(\.[\w*?]+)*")
"""The path of a module, with stars."""


def _chunks(text: str, number: str) -> int:
    if not number.isdigit() or number == "1":
        raise PlanError(
            f"the plan {text!r} does not say in how many chunks logits are made; write {CHUNKED_LOSS}=8, or "
            f"{CHUNKED_LOSS} for as many as are usual"
        )
    return int(number)


def _schedule_word(item: str) -> str:
    """The word of an item without its number, also if that is written with a colon."""
    return re.split("[=:]", item, maxsplit=1)[0]


def _schedule(text: str, item: str) -> ScheduleKind:
    try:
        return schedule_kind(item)
    except ScheduleError as error:
        raise PlanError(f"the plan {text!r}: {error}") from None


def _stages(text: str, number: str) -> tuple[int, ...]:
    """The devices of each stage: one each for "pp=4", until the other axes say more."""
    sizes = number.split("+")
    if not all(size.isdigit() and int(size) > 0 for size in sizes) or sizes in (["0"], ["1"]):
        raise PlanError(f"the plan {text!r} does not say what stages pp has; write pp=2, or pp=1+3 for unequal ones")
    return tuple(map(int, sizes)) if len(sizes) > 1 else (1,) * int(number)


def _check_stages(text: str, request: PolicyRequest) -> None:
    stages = request.stages
    if not stages and request.schedule:
        raise PlanError(f"the plan {text!r} names the schedule {request.schedule.name}, but no pipeline; add pp=2")
    if request.free and request.parts:
        raise PlanError(f"the plan {text!r} has unequal stages; give them one policy without a number, as in pp=1+3,dp")
    if request.cuts and not stages:
        raise PlanError(f"the plan {text!r} says where stages begin, but has no pipeline; add pp=2")
    if stages and not request.free and any(size != math.prod(a.size for _, a in request.parts) for size in stages):
        raise PlanError(
            f"the plan {text!r} has stages of {', '.join(map(str, stages))} devices; say how each uses them with one "
            "policy without a number, as in pp=1+3,dp"
        )
