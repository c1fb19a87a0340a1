"""What will be split, where and when: plans, their files, and the policies that make them."""

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
