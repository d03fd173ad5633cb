"""The schedule as a dense table that has been checked, and its files."""
