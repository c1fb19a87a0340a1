"""What will be split, where and when: plans, their files, and the policies that make them."""

from .draft import Draft
from .plan import Plan, Segment
from .policies import POLICIES, Policy, draw
from .strings import Request, read_request

__all__ = ["POLICIES", "Draft", "Plan", "Policy", "Request", "Segment", "draw", "read_request"]
