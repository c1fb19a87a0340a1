"""`shardwright doctor`, with real ranks, and what it makes of checks that fail."""

import json
import os

import pytest

from shardwright.cli import main
from shardwright.doctor import Diagnosis, Machine, PlanCheck, as_text, check_plans, look_up


def test_a_quick_check_of_this_machine(capsys, monkeypatch):
    monkeypatch.setattr("shardwright.cli.doctor.QUICK", ("tp",))
    assert main(["doctor", "--quick", "--json"]) == 0
    out, err = capsys.readouterr()
    diagnosis = json.loads(out)
    assert diagnosis["healthy"]
    assert diagnosis["verdict"] == "1 of 1 kinds of plan match one device on 2 cpu ranks"
    assert diagnosis["plans"][0]["plan"] == "tp=2"
    assert 0.0 <= diagnosis["plans"][0]["deviation"] <= 1.0
    assert "tp=2     ok" in err


def test_a_plan_that_fails_is_reported_and_the_next_is_checked():
    failed, fine = check_plans(["nonsense", "dp"], "cpu", 2, timed=False)
    assert not failed.passed
    assert not failed.skipped
    assert "nonsense" in failed.error
    assert fine.passed


def test_the_verdict_names_what_failed():
    machine = Machine(facts={"software": {"torch": "2"}}, links="", warnings=("too few files",))
    checks = (
        PlanCheck(plan="dp=2", passed=True, deviation=0.1),
        PlanCheck(plan="tp=2", deviation=3.0),
        PlanCheck(plan="auto", skipped=True, error="not in the catalogue"),
    )
    diagnosis = Diagnosis(machine=machine, device="cpu", ranks=2, checks=checks)
    assert not diagnosis.healthy
    text = as_text(diagnosis)
    assert text.endswith(
        "verdict: 1 of 3 kinds of plan match one device on 2 cpu ranks; FAILED: tp=2; not checked: auto"
    )
    assert "DIFFERS" in text
    assert "too few files" in text


def test_facts_and_warnings(monkeypatch):
    monkeypatch.setenv("SHARDWRIGHT_SECRET_TOKEN", "hidden")
    monkeypatch.setenv("SHARDWRIGHT_SHARED_MEMORY", "1")
    machine = look_up("cpu", 1000)
    assert machine.facts["settings"]["SHARDWRIGHT_SHARED_MEMORY"] == "1"
    assert "hidden" not in str(machine)
    assert any("1000 ranks share" in warning for warning in machine.warnings)
    assert {"software", "devices", "processor", "memory", "limits"} <= set(machine.facts)
    assert os.uname().nodename not in str(machine.facts["software"])


@pytest.mark.parametrize("words", [["--ranks", "1"], ["--device", "cuda", "--ranks", "2"]])
def test_what_cannot_be_checked_is_refused(words, capsys):
    assert main(["doctor", *words]) == 2
    assert "shardwright doctor: --ranks" in capsys.readouterr().err
