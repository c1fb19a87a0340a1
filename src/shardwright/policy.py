"""The policy API: plans written by hand, in full or in part. See docs/policies.md.

    def policy(graph, cluster):
        plan = PolicyBuilder(graph, cluster, dp=2, tp=2)
        plan.split(dim="batch", over="dp")
        plan.split("blocks.*.mlp.up", "n", over="tp")
        return plan.build()          or plan, for a search for what is left open
"""

from .plan.policy_builder import PolicyBuilder
from .plan.repeat import repeated
from .plan.selection import select

__all__ = ["PolicyBuilder", "repeated", "select"]
