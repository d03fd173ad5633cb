"""From a table to a program of integers."""
