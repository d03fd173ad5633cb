"""Costs of stages: the work of their layers, their memory, the costs of a schedule."""
