"""Pipelines as they ran, and run again."""
