"""Tuning by gradient: what to set so that a step takes the least time. Needs optax.

One file for each thing that is tuned. All go the same way: a relaxation that may take any real
number, descent along the exact gradient of the step time from many starts at once, rounding to
what is legal, and exact evaluation of what is left. `tune.py` is the front door to all of them.
"""
