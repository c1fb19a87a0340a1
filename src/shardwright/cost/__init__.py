"""What things cost. So far: the arithmetic of an op; time and memory come with the planner."""

from .work import flops

__all__ = ["flops"]
