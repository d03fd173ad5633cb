"""Figures of OptPipe (arXiv 2510.05186)."""
