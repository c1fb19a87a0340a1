"""What will be split, where and when: plans, their files, and the policies that make them."""

from .draft import Draft
from .plan import Plan, Segment
from .policies import POLICIES, Policy, draw
from .recompute import layers_of, region_path, regions_of
from .strings import Request, read_request

__all__ = ["POLICIES", "Draft", "Plan", "Policy", "Request", "Segment", "draw", "layers_of", "read_request",
           "region_path", "regions_of"]  # fmt: skip
