"""Heuristics that order ops where only placement, times and limits are given."""
