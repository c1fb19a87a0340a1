"""Pools of gloo processes that all parity tests share."""

from collections.abc import Iterator

import pytest

from .pool import Pool


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[int, Pool]]:
    """A pool for each world size; processes start with the first job."""
    by_key = {size: Pool(size) for size in (2, 4)}
    yield by_key
    for pool in by_key.values():
        pool.close()
