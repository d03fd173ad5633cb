"""Figures of the findings."""
