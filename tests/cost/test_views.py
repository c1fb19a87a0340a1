"""An op is defined as a view if torch's schema says that its result shares memory with an input."""

from __future__ import annotations

import pytest
import torch

from shardwright.ops import defined

SHARING = {"_unsafe_view": "a view whose input nobody reads any more, so that torch does not say that it is one"}


@pytest.mark.parametrize("name", [name for name, spec in defined() if spec.view is not None])
def test_a_view_shares_memory_with_what_it_shows(name: str) -> None:
    packet = getattr(torch.ops.aten, name)
    returns = [item for overload in packet.overloads() for item in getattr(packet, overload)._schema.returns]

    assert name in SHARING or any(item.alias_info is not None and not item.alias_info.is_write for item in returns)
