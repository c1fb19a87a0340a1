"""The exact search of the planner, on an abstract problem of variables and factors.

Read `problem.py` (the problem), `solve.py` (the way to a solution and its lower bound), `elimination.py` with
`order.py` and `narrow.py` (min-sum elimination), `dual.py` and `simplex.py` (multipliers of overlap and memory),
`recombine.py` and `pareto.py` (closing the gap). `ilp.py` solves the same with an ILP solver, for tests.
"""

from .ilp import solve_ilp
from .problem import CostFactor, Problem, Solution
from .solve import least_memory, relax, solve

__all__ = ["CostFactor", "Problem", "Solution", "least_memory", "relax", "solve", "solve_ilp"]
