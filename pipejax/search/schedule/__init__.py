"""Schedules optimised under a memory limit, with a bound that says how far from the best they are.

After OptPipe (arXiv:2510.05186), with OR-Tools CP-SAT in the place of its solver.
"""

from pipejax.search.schedule.optimize import optimize
from pipejax.search.schedule.problem import OBJECTIVES, InfeasibleError
from pipejax.search.schedule.solution import Solution
from pipejax.search.schedule.store import Store, StoreWarning

__all__ = ["OBJECTIVES", "InfeasibleError", "Solution", "Store", "StoreWarning", "optimize"]
