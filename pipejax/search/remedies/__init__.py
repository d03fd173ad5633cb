"""Remedies that make a step shorter: each remedy is applied, and the run evaluated again."""
