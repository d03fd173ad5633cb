"""Schedules optimised under a memory limit, with a bound that says how far from the best they are.

After OptPipe (arXiv:2510.05186), with OR-Tools CP-SAT in the place of its solver.
"""

from pipejax.optimize.front import optimize
from pipejax.optimize.problem import OBJECTIVES, InfeasibleError
from pipejax.optimize.solution import Solution
from pipejax.optimize.store import Store, StoreWarning

__all__ = ["OBJECTIVES", "InfeasibleError", "Solution", "Store", "StoreWarning", "optimize"]
