"""Pools of gloo processes, as parity tests have them."""

from tests.parity.conftest import pools

__all__ = ["pools"]
