"""`shardwright doctor`: facts about the machine, then the checks as they end, then a verdict."""

from __future__ import annotations

import json
from argparse import Namespace

from rich.console import Console

from ..doctor import ALL, QUICK, Diagnosis, as_json, as_text, check_plans, look_up
from ..doctor.report import line_of
from ..errors import InputError
from ..runtime import accelerator
from ..runtime.world import refuse_inside


def run_doctor(options: Namespace, console: Console) -> int:
    """Check, show, and say by the exit code whether all is well."""
    refuse_inside("shardwright doctor")
    if options.ranks < 2:
        raise InputError(f"--ranks {options.ranks}: a plan for one rank proves nothing; use at least 2")
    device = options.device or accelerator.kind()
    count = accelerator.count_of(device)
    if count is not None and count < options.ranks:
        raise InputError(
            f"--ranks {options.ranks}, and there are {count} devices of type {device}; pass --device cpu to check the "
            "processor instead"
        )
    machine = look_up(device, options.ranks)
    progress = Console(stderr=True)
    checks = []
    for check in check_plans(QUICK if options.quick else ALL, device, options.ranks, timed=not options.quick):
        checks.append(check)
        progress.print(line_of(check), highlight=False, markup=False, soft_wrap=True)
    diagnosis = Diagnosis(machine=machine, device=device, ranks=options.ranks, checks=tuple(checks))
    text = json.dumps(as_json(diagnosis), indent=2) if options.json else as_text(diagnosis)
    console.print(text, highlight=False, markup=False, soft_wrap=True)
    return 0 if diagnosis.healthy else 1
