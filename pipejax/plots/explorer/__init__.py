"""The explorer: a page without a server that shows a run and changes its costs."""
