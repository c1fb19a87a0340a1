"""`shardwright doctor`: what this machine is, and whether every kind of plan is right and quick on it.

Read `machine.py` (what is looked up), `checks.py` (what ranks run), `models.py` (on which models) and `report.py` (the
text and the JSON). Nothing is written, and nothing but the ranks is started.
"""

from .checks import ALL, QUICK, PlanCheck, check_plans
from .machine import Machine, look_up
from .report import Diagnosis, as_json, as_text

__all__ = ["ALL", "QUICK", "Diagnosis", "Machine", "PlanCheck", "as_json", "as_text", "check_plans", "look_up"]
