"""What things cost. So far: the arithmetic of an op; time and memory come with the planner."""

from .work import flops, is_product

__all__ = ["flops", "is_product"]
