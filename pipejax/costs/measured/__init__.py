"""Readers of measurement files: costs of ops and messages, step times of runs, collectives."""
