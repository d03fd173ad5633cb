"""Phases, ops, placements, and what waits for what."""
