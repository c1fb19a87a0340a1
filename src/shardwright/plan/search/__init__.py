"""The exact search of the planner, on an abstract problem of variables and factors."""

from .problem import Factor, Problem, Solution

__all__ = ["Factor", "Problem", "Solution"]
