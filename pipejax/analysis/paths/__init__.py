"""Paths of a run: the longest ones, those that change, and what messages wait for."""
