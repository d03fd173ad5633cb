"""Search for the best schedule under a memory limit, with a lower bound on all schedules.

The search follows OptPipe (arXiv:2510.05186), with OR-Tools CP-SAT in place of OptPipe's solver.
"""
