"""Figures: each reads a dataset and draws. A figure never computes."""
