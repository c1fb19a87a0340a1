"""The short way to say a plan: "dp=2,tp=2", or "dp=2,tp=2,recompute"."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import PlanError
from ..layout import Axis, Mesh

KNOWN = ("dp", "tp", "sp", "ep", "zero1", "zero2", "zero3")
REPLICAS = ("dp", "zero1", "zero2", "zero3", "ep")
"""Policies that split the batch."""
RECOMPUTE = "recompute"
"""The word that asks for every repeated layer to be run again in backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Which policy on which axis, in the order of the mesh, and whether layers are recomputed."""

    parts: tuple[tuple[str, Axis], ...]
    recompute: bool = False

    @property
    def mesh(self) -> Mesh:
        return Mesh(axes=tuple(axis for _, axis in self.parts))

    def __str__(self) -> str:
        parts = [f"{policy}={axis.size}" for policy, axis in self.parts] or ["single"]
        return ",".join([*parts, RECOMPUTE] if self.recompute else parts)


def read_request(text: str, world: int | None = None, names: tuple[str, ...] = KNOWN) -> Request:
    """Read a plan string; `world` is the number of devices that it must come out at."""
    parts: list[tuple[str, Axis]] = []
    items = text.replace(" ", "").split(",")
    for item in items:
        if item in ("", "single", RECOMPUTE):
            continue
        policy, equals, number = item.partition("=")
        if policy == RECOMPUTE:
            raise PlanError(f"the plan {text!r} gives {RECOMPUTE} a number; it is a word of its own, for all layers")
        if policy not in names:
            known = ", ".join((*names, RECOMPUTE))
            raise PlanError(f"the plan {text!r} asks for {policy!r}; known are {known}, as in 'dp=2,tp=2'")
        if not equals or not number.isdigit():
            raise PlanError(f"the plan {text!r} does not say how many devices {policy} has; write {policy}=2")
        if int(number) < 2:
            raise PlanError(
                f"the plan {text!r} gives {policy} {number} device(s); leave an axis out if it has just one"
            )
        if any(policy == held for held, _ in parts):
            raise PlanError(f"the plan {text!r} names {policy} twice")
        name = "dp" if policy.startswith("zero") and not any(axis.name == "dp" for _, axis in parts) else policy
        name = "tp" if policy == "sp" and not any(axis.name == "tp" for _, axis in parts) else name
        parts.append((policy, Axis(name=name, size=int(number))))
    # replicas outside, experts between them and tensor parallelism, which is between neighbours
    parts.sort(key=lambda part: (part[0] not in REPLICAS, part[0] == "ep"))
    request = Request(parts=tuple(parts), recompute=RECOMPUTE in items)
    if world is not None and request.mesh.size != world:
        raise PlanError(
            f"the plan {text!r} is for {request.mesh.size} devices, but there are {world} processes; "
            f"start {request.mesh.size} (torchrun --nproc-per-node={request.mesh.size}) or change the plan"
        )
    return request
