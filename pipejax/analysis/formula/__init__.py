"""Exact closed forms: the makespan as a maximum of sums such as 6F + 4B in a few parameters."""
