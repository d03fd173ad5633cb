"""Schedules optimised under a memory limit, with a bound that says how far from the best they are.

After OptPipe (arXiv:2510.05186), with OR-Tools CP-SAT in the place of its solver.
"""
