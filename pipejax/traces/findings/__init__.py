"""Findings from a replayed trace."""
