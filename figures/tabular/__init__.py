"""Figures of the tabular-schedule paper (arXiv 2605.24006)."""
