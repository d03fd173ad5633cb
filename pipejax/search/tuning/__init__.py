"""Tuning of settings for the shortest step; needs optax.

Few settings are all evaluated. Of many, a relaxation may take any real number: descent along the
exact gradient of the step time from many starts at once, rounding to what is legal, and exact
evaluation of what is left. `tune.py` is the front door.
"""
