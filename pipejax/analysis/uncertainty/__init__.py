"""Runs at uncertain costs: random durations, named sets of costs, influence of each cost."""
