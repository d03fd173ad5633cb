"""Exact closed forms: the makespan as a maximum of linear forms in a few parameters."""
