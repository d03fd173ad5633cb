"""The explorer: a page without a server that shows runs and recomputes them at new costs."""
