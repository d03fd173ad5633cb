"""Figures of the PipeDream theory (arXiv 2606.03498)."""
