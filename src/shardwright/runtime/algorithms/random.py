"""Dropout that knows who draws: the same mask where a value is replicated, another on every shard.

A generator is seeded by a key for every draw, so that nothing depends on how many draws
came before, and a recomputation in backward draws the same mask again. The key is

    (seed, step, microbatch, op, where the rank stands on the axes that split the value)

Time is one of these axes: what microbatches do not split is drawn once for all of them. The microbatch itself is in
the key only where each is a batch of its own.

In **exact** mode the key is (seed, step, op) alone: every rank draws the mask of the global
value and takes its shard of it. That is slow, and makes any number of ranks agree with
one device to the last bit, which is how dropout is verified. `ExactDropout` makes an
ordinary model on one device draw those global masks.
"""

from __future__ import annotations

import hashlib
import math
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardwright.errors import InputError
from shardwright.layout import Shard

from ..collectives import blocks
from ..world import Group

Splits = Sequence[tuple[int, Group, Shard | None]]
"""What shards a value: (dim, group, sharding), major to minor on each dim. None is the even sharding.

A split in time is one of them: a Group of axis "time" with the microbatch as its index.
"""


_GENERATOR = threading.RLock()  # torch's own generator is one for all threads, and ranks may be threads


@dataclass(slots=True, kw_only=True)
class Randomness:
    """What a stage draws from. `step` is advanced once for each training forward, not in a recomputation."""

    seed: int = 0
    step: int = 0
    microbatch: int = 0
    exact: bool = False
    apart: bool = False  # each microbatch is a batch of its own

    @property
    def batch(self) -> tuple[int, int, int]:
        """What a key begins with."""
        return self.seed, self.step, self.microbatch if self.apart else 0

    def advance(self) -> None:
        self.step += 1
        self.microbatch = 0

    @contextmanager
    def at(self, step: int, microbatch: int) -> Iterator[None]:
        """Draw as in that forward: for a recomputation, when others may have run since."""
        before = self.step, self.microbatch
        self.step, self.microbatch = step, microbatch
        try:
            yield
        finally:
            self.step, self.microbatch = before

    @contextmanager
    def drawing(self, op: str) -> Iterator[None]:
        """For random ops that can't be sharded (`rand_like`): all ranks draw the same global value, by the op's key."""
        with _GENERATOR, torch.random.fork_rng():
            torch.manual_seed(seed_of((*self.batch, op)))
            yield

    def dropout(self, x: Tensor, p: float, op: str, splits: Splits = (), *, training: bool = True) -> Tensor:
        """`F.dropout`, where `op` names the call (once a step) and `splits` says what is split and how."""
        if not training or p == 0.0:
            return x
        return x * self.keep(x.shape, x.device, p, op, splits) * _scale(p)

    def keep(self, shape: Sequence[int], device: torch.device, p: float, op: str, splits: Splits = ()) -> Tensor:
        """The mask for a local shape: True with probability 1 - p."""
        if not self.exact:
            where = sorted((group.axes, group.index) for _, group, _ in splits if group.size > 1)
            return _draw(shape, device, p, (*self.batch, op, where))
        mask = _draw(_global_shape(shape, splits), device, p, (self.seed, self.step, op))
        for dim, group, sharding in splits:
            mask = blocks.shard(mask, dim, sharding or blocks.plain(mask.shape[dim]), group.size, group.index)
        return mask

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        *,
        op: str,
        splits: Splits = (),
    ) -> Tensor:
        """`F.scaled_dot_product_attention` with dropout; `splits` are those of the weights [.., query, key].

        Queries may be sharded, by any rows; keys are all there.
        """
        if dropout_p == 0.0:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if is_causal:
            attn_mask = _positions(query, splits)[:, None] >= torch.arange(key.shape[-2], device=key.device)
        weights = _attention_weights(query, key, attn_mask, is_causal, scale, enable_gqa)
        if enable_gqa:
            value = _repeat_heads(value, query)
        return self.dropout(weights, dropout_p, op, splits) @ value


def _scale(p: float) -> float:
    return 0.0 if p == 1.0 else 1.0 / (1.0 - p)


def _draw(shape: Sequence[int], device: torch.device, p: float, key: tuple[object, ...]) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed_of(key))
    return torch.empty(tuple(shape), dtype=torch.bool, device=device).bernoulli_(1.0 - p, generator=generator)


def seed_of(key: tuple[object, ...]) -> int:
    """A number that is the same for the same key in every process (Python's own hash is not)."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest()) >> 1


def _global_shape(shape: Sequence[int], splits: Splits) -> list[int]:
    global_shape = list(shape)
    for dim, group, sharding in reversed(splits):
        global_shape[dim] = global_shape[dim] * group.size if sharding is None else sharding.elements
    return global_shape


def _positions(query: Tensor, splits: Splits) -> Tensor:
    """Where in the sequence the queries of this rank are."""
    rows = [(dim, group, sharding) for dim, group, sharding in splits if dim % query.ndim == query.ndim - 2]
    count = _global_shape(query.shape, [(query.ndim - 2, group, sharding) for _, group, sharding in rows])[-2]
    at = torch.arange(count, device=query.device)
    for _, group, sharding in rows:
        at = blocks.shard(at, 0, sharding or blocks.plain(len(at)), group.size, group.index)
    return at


def _attention_weights(
    query: Tensor, key: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None, enable_gqa: bool
) -> Tensor:
    if enable_gqa:
        key = _repeat_heads(key, query)
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype is torch.bool else scores + attn_mask
    if attn_mask is None or is_causal:
        return scores.softmax(-1)
    # torch gives zeros, not NaN, to a query that may look at nothing
    nothing = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)


def _repeat_heads(x: Tensor, query: Tensor) -> Tensor:
    return x.repeat_interleave(query.shape[-3] // x.shape[-3], -3)


class ExactDropout(TorchFunctionMode):
    """Make a model on one device draw global masks: the calls of dropout, in order, are the ops named.

    Calls that drop nothing (p = 0, or in evaluation) take no name. The order starts anew
    each time the mode is entered.
    """

    def __init__(self, randomness: Randomness, op_names: Sequence[str]) -> None:
        super().__init__()
        self._drawn = Randomness(seed=randomness.seed, step=randomness.step, exact=True)
        self._randomness = randomness
        self._names = tuple(op_names)
        self._at = 0
        self._resting = False

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Within this the model draws as it would: in parts that are no dropouts of the graph."""
        self._resting = True
        try:
            yield
        finally:
            self._resting = False

    def __enter__(self) -> ExactDropout:
        self._at = 0
        self._drawn.step = self._randomness.step
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types_: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self._resting:
            return func(*args, **kwargs)
        if func is F.dropout:
            return self._dropout(*args, **kwargs)
        if func is torch.dropout:
            return self._torch_dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self._inside(func)(*args, **kwargs)
        if func in _OTHERS and kwargs["training"]:  # torch.nn.functional passes it by name
            raise InputError(f"{func.__name__} can't be drawn exactly; use F.dropout, or verify in evaluation mode")
        return func(*args, **kwargs)

    def _name(self) -> str:
        if self._at == len(self._names):
            raise InputError(f"the model calls dropout more than the {len(self._names)} times that were named")
        self._at += 1
        return self._names[self._at - 1]

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0.0:
            return input
        y = self._drawn.dropout(input, p, self._name())
        return input.copy_(y) if inplace else y

    def _torch_dropout(self, input: Tensor, p: float, train: bool) -> Tensor:
        return self._dropout(input, p, train)

    def _attention(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        named = dict(zip(("attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
        op = self._name() if named.get("dropout_p", 0.0) > 0.0 else ""
        return self._drawn.attention(query, key, value, **named, op=op)

    def _inside(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """The same function with our dropout in it: within a call that a mode has seen, the mode is off."""
        assert isinstance(func, types.FunctionType)
        names = {
            "has_torch_function": lambda _: False,
            "dropout": self._dropout,
            "scaled_dot_product_attention": self._attention,
        }
        function = types.FunctionType(func.__code__, {**func.__globals__, **names}, func.__name__, func.__defaults__)
        function.__kwdefaults__ = func.__kwdefaults__
        return function


_OTHERS = (F.alpha_dropout, F.feature_alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d)
