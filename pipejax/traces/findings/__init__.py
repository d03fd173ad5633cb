"""Findings from a replayed trace: costs of places, outliers, forecast and advice."""
