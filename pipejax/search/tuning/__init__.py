"""Tuning of settings for the shortest step.

If there are few settings, all are evaluated. If there are many, the best plain settings are
improved by moves of one layer. `tune.py` has the entry point.
"""
