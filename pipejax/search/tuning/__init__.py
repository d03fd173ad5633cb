"""Tuning of settings for the shortest step.

Few settings are all evaluated. Of many, the best usual ones are improved by moves of one layer.
`tune.py` is the front door.
"""
