"""Search for the best schedule under a memory limit, with a bound on all others.

After OptPipe (arXiv:2510.05186), with OR-Tools CP-SAT in the place of its solver.
"""
