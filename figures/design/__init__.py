"""Figures of the design studies."""
