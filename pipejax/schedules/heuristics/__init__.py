"""Heuristics that order ops, given placement, op times and memory limits."""
