"""Shared by all figures: the look of schedules, and rules of print."""
