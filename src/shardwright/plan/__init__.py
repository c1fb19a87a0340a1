"""What is split, where and when: plans, their files, the policies and the search that make them.

Read `plan.py` and `file.py` (a plan and its JSON), `strings.py`, `builder.py` and `policies.py` (plan strings),
`auto.py` (the search), with `op_kinds.py`, `spaces.py`, `problem_structure.py` and `tables.py` (what it searches) and
`search/` (how); `price.py` prices any plan. `stages.py` and `pipeline.py` make pipelines, `joint/` searches for them.
`lowering.py` makes the programs of a plan.
"""

from .builder import PlanBuilder
from .plan import Plan, PlanStage
from .policies import POLICIES, Policy, build_plan
from .strings import PolicyRequest, parse_plan_string

__all__ = [
           "POLICIES",
           "Plan",
           "PlanBuilder",
           "PlanStage",
           "Policy",
           "PolicyRequest",
           "build_plan",
           "parse_plan_string",
]  # fmt: skip
