"""The tabular-schedule paper (arXiv 2605.24006): fit, datasets, Table I, claims."""
