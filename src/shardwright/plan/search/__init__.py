"""The exact search of the planner, on an abstract problem of variables and factors."""

from .ilp import solve_ilp
from .problem import CostFactor, Problem, Solution
from .solve import least_memory, relax, solve

__all__ = ["CostFactor", "Problem", "Solution", "least_memory", "relax", "solve", "solve_ilp"]
