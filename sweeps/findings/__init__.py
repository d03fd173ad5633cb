"""Findings: what follows from the evaluator that nobody has published, with where it holds."""
