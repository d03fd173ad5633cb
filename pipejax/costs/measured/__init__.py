"""Measurements read from files: costs of ops and messages, rows of runs and collectives."""
