"""Pictures of a trace, and its report as a page."""
