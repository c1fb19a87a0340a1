"""The diagnosis as text that can be pasted into an issue, and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .checks import PlanCheck
from .machine import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """A machine and the plans that were checked on it."""

    machine: Machine
    device: str
    ranks: int
    checks: tuple[PlanCheck, ...]

    @property
    def healthy(self) -> bool:
        """Whether every plan that can be checked here is right."""
        tried = [check for check in self.checks if not check.skipped]
        return bool(tried) and all(check.passed for check in tried)

    @property
    def verdict(self) -> str:
        """One line."""
        skipped = [check.plan for check in self.checks if check.skipped]
        failed = [check.plan for check in self.checks if not check.passed and not check.skipped]
        passed = len(self.checks) - len(skipped) - len(failed)
        where = f"{self.ranks} {self.device} ranks"
        text = f"{passed} of {len(self.checks)} kinds of plan match one device on {where}"
        text += f"; FAILED: {', '.join(failed)}" if failed else ""
        return text + (f"; not checked: {', '.join(skipped)}" if skipped else "")


def as_text(diagnosis: Diagnosis) -> str:
    """Plain lines."""
    machine = diagnosis.machine
    lines: list[str] = []
    for section, facts in machine.facts.items():
        lines += [section, *(f"  {name:24} {value}" for name, value in facts.items())] if facts else []
    lines += ["links", *(f"  {line}" for line in machine.links.splitlines())] if machine.links else []
    lines += ["plans", *(f"  {line_of(check)}" for check in diagnosis.checks)]
    lines += ["warnings", *(f"  {warning}" for warning in machine.warnings)] if machine.warnings else []
    return "\n".join([*lines, f"verdict: {diagnosis.verdict}"])


def line_of(check: PlanCheck) -> str:
    """A check on one line; a long error on several."""
    if check.error:
        kind = "not checked" if check.skipped else "FAILED"
        return f"{check.plan:8} {kind}: {check.error}"
    state = "ok" if check.passed else "DIFFERS"
    text = f"{check.plan:8} {state:8} deviation {check.deviation:.1e} of what is allowed"
    if check.step is None or check.speed is None:
        return text
    of = "" if check.plan.startswith("ep") else f", {check.speed:.2f} x one device"  # another model
    return f"{text}, {check.step * 1e3:.1f} ms a step{of}"


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """All of it, for programs."""
    return {
        "healthy": diagnosis.healthy,
        "verdict": diagnosis.verdict,
        "device": diagnosis.device,
        "ranks": diagnosis.ranks,
        "machine": asdict(diagnosis.machine),
        "plans": [asdict(check) for check in diagnosis.checks],
    }
