"""The published schedules, one file for each family."""
