from tests.parity.conftest import pools

__all__ = ["pools"]
