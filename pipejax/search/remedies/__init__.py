"""Remedies that make a step shorter: each is applied, and the run repeated."""
