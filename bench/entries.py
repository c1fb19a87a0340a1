"""What is claimed, and whether a measurement holds it."""

from dataclasses import dataclass
from statistics import median
from typing import Literal

from .compile_llama import Compiled
from .race import Ratio, spread_of


@dataclass(frozen=True, kw_only=True)
class Claim:
    name: str
    goal: float
    better: Literal["more", "less"]
    unit: str = ""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A claim with its measurement; without one it does not hold."""

    claim: Claim
    measured: Ratio | None
    why_not: str = ""

    @property
    def holds(self) -> bool:
        if self.measured is None:
            return False
        value, goal = self.measured.value, self.claim.goal
        return value >= goal if self.claim.better == "more" else value <= goal

    def record(self) -> dict[str, object]:
        """A line of results.json. A measurement in seconds, lines or GiB stands in `ratio` too; the name says so."""
        unit = f" [{self.claim.unit}]" if self.claim.unit else ""
        return {
            "name": self.claim.name + unit,
            "ratio": round(self.measured.value, 4) if self.measured else None,
            "goal": self.claim.goal,
            "spread": round(self.measured.spread, 4) if self.measured else None,
            "holds": self.holds,
        }


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Time of the peer over time of ours."""

    peer: str
    ours: str
    goal: float

    def claim(self, work: str) -> Claim:
        names = {"ddp": "DDP", "fsdp2": "FSDP2", "dtensor": "DTensor TP"}
        name = f"{names.get(self.peer, self.peer)} time / {self.ours} time, {work}"
        return Claim(name=name, goal=self.goal, better="more")


PAIRS = (
    Pair(peer="ddp", ours="dp=2", goal=1.0),
    Pair(peer="fsdp2", ours="zero3=2", goal=1.0),
    Pair(peer="dtensor", ours="tp=2", goal=1.3),
)
OVERHEAD = Claim(name="generated CPU time / eager CPU time, one rank", goal=1.02, better="less")

LLAMA = "Llama-70B"
CAPTURE = Claim(name=f"{LLAMA}: capture", goal=20.0, better="less", unit="s")
COMPILE = Claim(name=f"{LLAMA}: compile without capture, tp=8,dp=64", goal=5.0, better="less", unit="s")
SAME = Claim(name=f"{LLAMA}: compile for 4096 ranks / for 8", goal=1.2, better="less")
LINES = Claim(name=f"{LLAMA}: emitted file", goal=1000, better="less", unit="lines")
PEAK = Claim(name=f"{LLAMA}: peak memory", goal=3.0, better="less", unit="GiB")


def compile_entries(few: Compiled, middle: Compiled, many: Compiled) -> list[Entry]:
    captures = [few.capture, middle.capture, many.capture]
    growth = min(many.compile) / min(few.compile)
    noise = spread_of([a / b for a, b in zip(many.compile, few.compile, strict=True)])
    measured = {
        CAPTURE: Ratio(value=median(captures), spread=spread_of(captures)),
        COMPILE: Ratio(value=median(middle.compile), spread=spread_of(middle.compile)),
        SAME: Ratio(value=growth, spread=noise),
        LINES: Ratio(value=max(few.lines, middle.lines, many.lines), spread=0.0),
        PEAK: Ratio(value=max(few.peak, middle.peak, many.peak), spread=0.0),
    }
    return [Entry(claim=claim, measured=ratio) for claim, ratio in measured.items()]


def unmeasured_compile(why: str) -> list[Entry]:
    return [Entry(claim=claim, measured=None, why_not=why) for claim in (CAPTURE, COMPILE, SAME, LINES, PEAK)]
