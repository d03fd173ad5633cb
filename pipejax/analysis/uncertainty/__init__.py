"""Runs whose costs are not known: random ones, corners, and what each cost counts for."""
