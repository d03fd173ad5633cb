"""Runs at uncertain costs: random costs, corners, and the influence of each cost."""
