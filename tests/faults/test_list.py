"""The list of faults keeps applying to the package."""

from __future__ import annotations

import pytest

from tests.faults.__main__ import FAULTS
from tests.faults.fault import PACKAGE, Fault


def test_there_are_more_than_a_hundred_and_none_is_there_twice() -> None:
    assert len({(fault.file, fault.before, fault.after) for fault in FAULTS}) == len(FAULTS) > 100


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_still_applies(fault: Fault) -> None:
    assert fault.count == 1, f"`{fault.before}` is {fault.count} times in {fault.file}; say the fault anew"
    assert fault.before != fault.after
    compile(fault.text, fault.file, "exec")
    if fault.test:
        assert (PACKAGE.parents[1] / "tests" / fault.test.split("::")[0]).exists()
