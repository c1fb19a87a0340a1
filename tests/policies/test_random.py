"""A few of the random policies of `python -m tests.policies`: right, or refused by an error of ours."""

from shardwright.runtime.collectives import process_group

from .trial import try_policy


def test_random_policies_are_right_or_refused():
    outcomes = [try_policy(seed) for seed in (1, 4, 5, 6)]
    assert [str(outcome) for outcome in outcomes if outcome.fault] == []
    assert sum(not outcome.refused for outcome in outcomes) > 2  # else little was compared


def test_a_wrong_result_is_a_fault(monkeypatch):
    """With sums that are a little off, results differ, and that is seen."""
    real = process_group.all_reduce
    monkeypatch.setattr(process_group, "all_reduce", lambda x, *args: real(x.mul_(1.01), *args))
    assert try_policy(1).fault
