"""Phases, ops, placements and dependencies."""
