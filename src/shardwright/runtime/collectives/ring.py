"""Messages around a ring of ranks: every rank sends to the rank some places on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..faults import flight_recorder
from ..faults.watch import report_failure
from ..world import Group
from . import comm, process_group


@report_failure
def shift_async(x: Tensor, by: int, group: Group) -> Callable[[], Tensor]:
    """Start to send a contiguous tensor to the rank `by` places on. Calling the result waits for what arrives here.

    All ranks send equally many elements. No autograd.
    """
    got = torch.empty_like(x)
    comm.note("send", group, tuple(x.shape))
    flight_recorder.enter("send", group.process_group, x.shape)
    work = process_group.shift(got, x, by, group.process_group)

    @report_failure
    def finish() -> Tensor:
        work.wait()
        return got

    return finish
