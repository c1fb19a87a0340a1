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
    "memory": "it writes by places in memory, which the values of a graph don't have",
    "statistics": "running statistics are written in place by an op that does not say so",
    "momentum": "with `momentum=None` the number of batches so far is taken out of a tensor",
    "mask": "a mask that is passed in is asked for its values (whether it is causal)",
    "channels": "a batch norm of a tensor without a dim of channels",
    "fake": "torch itself can't trace the op without running it",
}
"""Why something is refused, by a word."""

REFUSED: dict[str, str] = {
    **dict.fromkeys((
        "__getitem__", "argwhere", "bincount", "combinations", "masked_select", "nn.functional.one_hot", "nonzero",
        "repeat_interleave", "tensor_split", "unique", "unique_consecutive",
    ), "values"),
    **dict.fromkeys(("allclose", "corrcoef", "cov", "equal", "item", "narrow"), "number"),
    **dict.fromkeys(("sparse.mm.reduce", "sparse.sampled_addmm", "to_sparse"), "sparse"),
    "histogramdd": "list",
    "as_strided_scatter": "memory",
    **dict.fromkeys((
        "_batch_norm_with_update", "_native_batch_norm_legit", "nn.functional.instance_norm", "nn.InstanceNorm1d",
        "nn.InstanceNorm2d", "nn.InstanceNorm3d",
    ), "statistics"),
    **dict.fromkeys(("nn.BatchNorm1d", "nn.BatchNorm2d", "nn.BatchNorm3d"), "momentum"),
    **dict.fromkeys(("nn.Transformer", "nn.TransformerEncoder"), "mask"),
    "nn.functional.batch_norm": "channels",
    **dict.fromkeys(("linalg.lstsq", "linalg.lstsq.grad_oriented", "nn.functional.ctc_loss", "nn.CTCLoss"), "fake"),
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
