"""Random searches keep to what holds of all of them; `python -m tests.plan.properties` draws thousands."""

import pytest

from tests.plan.properties import faults


@pytest.mark.parametrize("seed", [3, 7, 11])
def test_what_holds_of_every_search(seed):
    assert list(faults(seed, quick=True)) == []
