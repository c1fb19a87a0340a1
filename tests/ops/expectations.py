"""What is refused, and why; what can't be compared. `docs/ops.md` is written from here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

UNDEFINED = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
"""Subjects whose results hold whatever was in memory."""

REASONS: dict[str, str] = {
    "values": "the shape of the result depends on the values of a tensor (nonzero, masks, sizes given as a tensor)",
    "sparse": "sparse tensors, as input or result",
    "weights": "with `aweights`, whose values are looked at",
    "memory": "it writes by places in memory, which the values of a graph don't have",
    "statistics": "running statistics are written in place by an op that does not say so",
    "mask": "in eval `src_key_padding_mask` may pack rows without their padding, which depends on its values",
    "channels": "a batch norm of a tensor without a dim of channels",
    "rank": "what it returns beside the solution has a shape that depends on the rank of the matrix",
}
"""Why something is refused, by a word."""

REFUSED: dict[str, str] = {
    **dict.fromkeys((
        "__getitem__", "argwhere", "bincount", "masked_select", "nn.functional.one_hot", "nonzero",
        "repeat_interleave", "tensor_split", "unique", "unique_consecutive",
    ), "values"),
    **dict.fromkeys(("sparse.mm.reduce", "sparse.sampled_addmm", "to_sparse"), "sparse"),
    "cov": "weights",
    "as_strided_scatter": "memory",
    **dict.fromkeys(("_batch_norm_with_update", "_native_batch_norm_legit"), "statistics"),
    "nn.TransformerEncoder": "mask",
    "nn.functional.batch_norm": "channels",
    **dict.fromkeys(("linalg.lstsq", "linalg.lstsq.grad_oriented"), "rank"),
}  # fmt: skip
"""The word of `REASONS` for each subject of which some sample is refused."""


def undefined(subject: str) -> bool:
    return subject in UNDEFINED


def unexpected(findings: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """Refusals that are not listed: the sample, and what was said."""
    for finding in findings:
        if finding.verdict.kind == "refused" and finding.task.subject not in REFUSED:
            yield finding.sample, finding.verdict.detail


def unneeded(findings: Iterable[Any]) -> list[str]:
    """Subjects that are listed and were tried, and of which nothing was refused."""
    findings = list(findings)
    tried = {finding.task.subject for finding in findings}
    refused = {finding.task.subject for finding in findings if finding.verdict.kind == "refused"}
    return sorted((tried & REFUSED.keys()) - refused)
