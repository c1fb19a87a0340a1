"""What is refused, and why; what can't be compared. `docs/ops.md` is written from here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

UNDEFINED = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
"""Subjects whose results hold whatever was in memory."""

REASONS: dict[str, str] = {
    "values": "the shape of the result depends on the values of a tensor (nonzero, masks, sizes given as a tensor)",
    "number": "a number is taken out of a tensor (`item`, a `start` that is a tensor), or decides how the call goes on",
    "sparse": "sparse tensors, as input or result",
    "list": "the op returns a list of tensors beside other tensors",
    "statistics": "running statistics are written in place by an op that does not say so (use `nn.BatchNorm*`)",
    "channels": "a batch norm of a tensor without a dim of channels",
    "fake": "torch itself can't trace the op without running it",
}
"""Why something is refused, by a word."""

REFUSED: dict[str, str] = {
    **dict.fromkeys((
        "argwhere", "bincount", "combinations", "masked_select", "nonzero", "unique", "unique_consecutive",
        "nn.functional.one_hot", "tensor_split",
    ), "values"),
    **dict.fromkeys(("allclose", "equal", "item", "cov", "corrcoef", "narrow"), "number"),
    **dict.fromkeys(("to_sparse", "sparse.mm.reduce", "sparse.sampled_addmm"), "sparse"),
    **dict.fromkeys(("histogramdd",), "list"),
    **dict.fromkeys((
        "_batch_norm_with_update", "_native_batch_norm_legit", "nn.functional.instance_norm",
    ), "statistics"),
    **dict.fromkeys(("nn.functional.batch_norm",), "channels"),
    **dict.fromkeys(("linalg.lstsq", "linalg.lstsq.grad_oriented", "nn.functional.ctc_loss"), "fake"),
}  # fmt: skip
"""The word of `REASONS` for each subject of which some sample is refused."""


def undefined(subject: str) -> bool:
    return subject in UNDEFINED


def unexpected(found: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """Refusals that are not listed: the sample, and what was said."""
    for finding in found:
        if finding.verdict.kind == "refused" and finding.task.subject not in REFUSED:
            yield finding.sample, finding.verdict.detail


def unneeded(found: Iterable[Any]) -> list[str]:
    """Subjects that are listed and were tried, and of which nothing was refused."""
    findings = list(found)
    tried = {finding.task.subject for finding in findings}
    refused = {finding.task.subject for finding in findings if finding.verdict.kind == "refused"}
    return sorted((tried & REFUSED.keys()) - refused)
