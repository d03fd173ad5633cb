"""Recorded pipelines, and replays of them under a link model."""
