"""Check in every call that ranks pass the inputs they should, without making ranks wait for each other.

A call computes a digest of each input on its device and posts five numbers; those of the others are read later:

    rank 0    digest, post | forward ............ | read, backward ...
    rank 1        digest, post | forward ............ | read, backward ...

    post      program, replica, digest of the batched inputs, digest of the unbatched inputs, backward passes before
    read      when backward reaches an output of the call, or else at the next call

Reading waits only for a rank that is a full forward behind, which the gradient sync would wait for anyway. It happens
before any gradient is computed, so that no parameter has changed when a wrong batch is found. All ranks read the
same numbers: if they don't match, all of them exchange which input it is, and all raise. The first call of a program
is read at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.errors import DriftError, InputError

from .. import world
from ..collectives import objects, process_group
from ..model.inputs import Mode
from . import flight_recorder
from .tensor_digest import tensor_digest, weights
from .watch import report_failure

BLAME = {
    "global": 'inputs="global" means that every rank passes the global batch; pass the same data everywhere (one '
    'seed and one order on all ranks), or use inputs="per_replica" (each replica its own samples) or inputs="per_rank" '
    "(each rank its own samples); if computed inputs differ in their last bits, skip the comparison after the first "
    "call with SHARDWRIGHT_COMPARE_INPUTS=0",
    "per_replica": 'inputs="per_replica" means that the ranks of one replica pass the same samples; sample by '
    "model.data_rank, not by the rank",
    "unbatched": "an input without a batch dim must be the same on every rank; pass the same, or if it has a "
    "batch dim, name the inputs that have none: compile=CompileOptions(unbatched=[...])",
}


@dataclass(frozen=True, kw_only=True)
class CallSignature:
    """The call of a program: its name, all arguments as text, and which tensors are batched."""

    program: str
    arguments: Mapping[str, str]  # by path: a shape, or a plain value
    tensors: tuple[str, ...]  # the paths of the tensors, in their order
    batched: tuple[bool, ...]
    mode: Mode  # what ranks pass
    frozen: dict[tuple[str, ...], CallSignature] = field(default_factory=dict, compare=False, repr=False)
    plain: int | None = None  # the number of the same call with nothing frozen, which decides whether it is the first

    def with_frozen(self, names: tuple[str, ...]) -> CallSignature:
        """The same call with these parameters frozen."""
        if not names:
            return self
        if names not in self.frozen:
            arguments = {**self.arguments, "frozen parameters": ", ".join(names)}
            self.frozen[names] = replace(self, arguments=arguments, frozen={}, plain=self.number)
        return self.frozen[names]

    @cached_property
    def number(self) -> int:
        return objects.text_digest(repr((self.program, self.mode, self.batched, sorted(self.arguments.items()))))


@dataclass(frozen=True, kw_only=True)
class PostedDigests:
    """What a rank has posted about a call, and how to read the posts of all ranks."""

    call: int
    signature: CallSignature
    is_first: bool
    each: Tensor  # the digest of each tensor
    backwards: int  # backward passes that this rank has begun before
    at: flight_recorder.Place | None  # of the call
    read: Callable[[], list[list[int]]]  # for each rank (program, replica, batched, unbatched, backwards)


class InputComparison:
    """The calls of one model on this rank: every `every`-th is compared, and the first of each program."""

    def __init__(self, first_only: bool = False) -> None:
        self.calls, self.every = 0, 0 if first_only else world.compare_every()
        self._posted: PostedDigests | None = None
        self._compared = False  # the call that runs
        self._backwards = 0  # that have come to an output of a call
        self._programs: set[int] = set()  # numbers of programs that were called
        self._constants: dict[tuple[int, tuple[int, int]], tuple[Tensor, Tensor]] = {}
        self._stream: torch.Stream | None = None

    @report_failure
    def begin(
        self, signature: CallSignature, tensors: Sequence[Tensor], replica: tuple[int, int], at_once: bool
    ) -> None:
        """A call begins: post its digests; with `at_once` also read those of all ranks.

        `replica` is the data-parallel replica of this rank, and their number.
        """
        self.settle()
        self._compared = False
        self.calls += 1
        plain = signature.plain or signature.number
        is_first = plain not in self._programs
        if not dist.is_initialized() or dist.get_world_size() < 2:
            return
        if not is_first and (not self.every or self.calls % self.every):
            return
        self._programs.add(plain)
        self._compared = True
        each = _digests(signature, tensors, is_first)
        head, mixing = self._constants_of(signature, replica, each.device)
        count = self._backwards
        read = self._post(torch.cat([head, (each * mixing).sum(1), head.new_full((1,), count)]))
        self._posted = PostedDigests(
            call=self.calls, signature=signature, is_first=is_first, each=each, backwards=count, read=read,
            at=flight_recorder.here(),
        )  # fmt: skip
        if is_first or at_once:
            self.settle()

    def until_backward(self, outputs: Sequence[Tensor]) -> None:
        """Read the posts when backward reaches one of these tensors, before it proceeds."""
        first = iter((True,))

        def reached(gradient: Tensor) -> None:
            self._backwards += next(first, False)  # once, whatever the number of outputs
            self.settle()

        for tensor in outputs if self._compared else ():
            if tensor.grad_fn is not None:
                tensor.register_hook(reached)  # type: ignore[no-untyped-call]

    @report_failure
    def settle(self) -> None:
        """Read the last posts, if still pending; raise on all ranks if they don't match."""
        posted, self._posted = self._posted, None
        if posted is not None:
            fault = _fault(posted, posted.read())
            if fault is not None:
                raise InputError(fault)

    def _constants_of(
        self, signature: CallSignature, replica: tuple[int, int], device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """The first two numbers of a post, and the masks that sum the digests of batched and of unbatched tensors.

        Cached, since copying numbers to an accelerator waits for it.
        """
        key = signature.number, replica
        if key not in self._constants:
            head = torch.tensor([signature.number, replica[0] << 32 | replica[1]], device=device)
            chosen = torch.tensor([signature.batched, [not has for has in signature.batched]], device=device)
            self._constants[key] = head, chosen.view(2, -1) * weights(chosen.shape[1], device)
        return self._constants[key]

    def _post(self, own: Tensor) -> Callable[[], list[list[int]]]:
        """Start the all_gather; call the result to wait for it."""
        size = dist.get_world_size()
        every = own.new_empty(size * own.numel())
        flight_recorder.enter("all_gather", None, "digests of the inputs")
        work = process_group.all_gather(every, own, None)
        if own.device.type == "cpu":

            def read() -> list[list[int]]:
                work.wait()
                return [list(digests) for digests in every.view(size, -1).tolist()]

            return read
        # A separate stream, so that the host waits for these few numbers and not for kernels launched after them.
        self._stream = self._stream or torch.Stream(own.device)
        self._stream.wait_stream(torch.accelerator.current_stream(own.device))
        with self._stream:
            work.wait()
            there = torch.empty(every.shape, dtype=every.dtype, pin_memory=True).copy_(every, non_blocking=True)
        event = self._stream.record_event()
        sources = own, every  # keep their memory alive until the copy is done

        def read_there() -> list[list[int]]:
            nonlocal sources
            event.synchronize()
            sources = ()  # type: ignore[assignment]
            return [list(digests) for digests in there.view(size, -1).tolist()]

        return read_there


def _digests(signature: CallSignature, tensors: Sequence[Tensor], is_first: bool) -> Tensor:
    """The digest of each tensor; 0 for what is not compared: gathered samples and, after the first call, activations.

    Outputs of other modules may differ in their last bits between devices, which is no mistake.
    """
    device = world.here().device
    nothing = torch.zeros((), dtype=torch.int64, device=device)
    digests = [
        nothing
        if (signature.mode == "per_rank" and batched) or (tensor.grad_fn is not None and not is_first)
        else tensor_digest(tensor).to(device, non_blocking=True)
        for tensor, batched in zip(tensors, signature.batched, strict=True)
    ]
    return torch.stack(digests) if digests else nothing.new_zeros(0)


def _fault(posted: PostedDigests, every: list[list[int]]) -> str | None:
    """The mismatch, if any; all ranks find the same."""
    replicas: dict[int, set[int]] = {}  # the digests of batches, by the ranks that must pass the same one
    if len({row[4] for row in every}) > 1:
        raise DriftError(_other_backwards(posted))
    for _, replica, batched, _, _ in every:
        replicas.setdefault(replica if posted.signature.mode == "per_replica" else 0, set()).add(batched)
    fits = len({(one_rank[0], one_rank[3]) for one_rank in every}) == 1 and all(
        len(batches) == 1 for batches in replicas.values()
    )
    if not fits:
        return _named(posted, [one_rank[1] for one_rank in every])
    alike = posted.is_first and any(posted.signature.batched) and len(replicas) > 1
    if alike and len({batches.pop() for batches in replicas.values()}) == 1:
        return (
            'inputs="per_replica" means that each data-parallel replica passes its own samples, but all pass the same; '
            'use model.data_rank and model.data_size in the sampler, or use inputs="global"'
        )
    return None


def _other_backwards(posted: PostedDigests) -> str:
    """Ranks that have run backward less or more often than others. All ranks must call it."""
    every = objects.all_gather_objects((posted.backwards, _line(posted)), "how often ranks have run backward")
    first = next(rank for rank, (count, _) in enumerate(every) if count != every[0][0])
    each = [f"rank {rank} has run backward {every[rank][0]} times before{every[rank][1]}" for rank in (0, first)]
    return (
        f"the ranks are desynchronized at call {posted.call} of the model: {', but '.join(each)}; call the model and "
        "backward on all ranks equally often. Ranks may have updated parameters that others have not: resume from a "
        "checkpoint"
    )


def _line(posted: PostedDigests) -> str:
    return f" at {flight_recorder.line_of(posted.at)}" if posted.at is not None else ""


def _named(posted: PostedDigests, replicas: Sequence[int]) -> str:
    """The first rank whose inputs differ, and which input. All ranks must call it."""
    signature, mode = posted.signature, posted.signature.mode
    digests = dict(zip(signature.tensors, posted.each.tolist(), strict=True))
    mine = posted.call, signature.program, dict(signature.arguments), digests
    every = objects.all_gather_objects(mine, "which input differs")
    for rank, (call, program, arguments, theirs) in enumerate(every):
        first = next(at for at in range(len(every)) if mode != "per_replica" or replicas[at] == replicas[rank])
        lead = f"in call {posted.call} of the model rank {rank}"
        if (call, program) != every[0][:2]:
            return (
                f"{lead} runs {program} (its call {call}), but rank 0 runs {every[0][1]} (its call {every[0][0]})"
                f"{_line(posted)}; "
                "call the model on all ranks in the same order, in train or eval mode alike, with the same arguments"
            )
        for path in {**every[0][2], **arguments}:
            value, other = arguments.get(path, "nothing"), every[0][2].get(path, "nothing")
            if value != other:
                return f"{lead} passes {value} as {path}, but rank 0 {other}{_line(posted)}; pass the same"
        for path, batched in zip(signature.tensors, signature.batched, strict=True):
            at = first if batched else 0
            if theirs[path] != every[at][3][path]:
                blame = BLAME[mode if batched else "unbatched"]
                what = "batch" if batched and mode == "global" else path
                named = f": {path} differs" if what == "batch" else ""
                lead = f"{lead} passes another {what} than rank {at}{named}{_line(posted)}"
                return f"{lead}; {blame}. No parameter was changed"
    return f"in call {posted.call} of the model the ranks pass different inputs; pass the same everywhere"
