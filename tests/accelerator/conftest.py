"""Ranks on stand-in accelerators, which all tests of this folder share."""

from collections.abc import Iterator

import pytest

from tests.parity.pool import Pool

from . import stand_in


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """Two ranks, each on its own stand-in. The first use on a machine compiles it: half a minute on a quiet core."""
    reason = stand_in.missing()
    if reason is not None:
        pytest.skip(reason)
    stand_in.build()
    pool = Pool(2, prepare=stand_in.prepare)
    yield pool
    pool.close()
