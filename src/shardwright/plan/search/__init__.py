"""The exact search of the planner, on an abstract problem of variables and factors."""

from .ilp import solve_ilp
from .problem import Factor, Problem, Solution
from .solve import relax, solve

__all__ = ["Factor", "Problem", "Solution", "relax", "solve", "solve_ilp"]
