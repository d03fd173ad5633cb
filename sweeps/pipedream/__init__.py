"""The PipeDream theory (arXiv 2606.03498): staleness, bounds, and ways to train."""
