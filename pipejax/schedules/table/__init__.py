"""The schedule as a dense, checked table, and its files."""
