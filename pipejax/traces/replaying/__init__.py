"""Pipelines as recorded, and their replays."""
