"""Pools of gloo processes that all parity tests share."""

from collections.abc import Iterator

import pytest

from .pool import Pool


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[int, Pool]]:
    """A pool for each world size; processes start with the first job."""
    held = {size: Pool(size) for size in (2, 4)}
    yield held
    for pool in held.values():
        pool.close()
