"""Benchmarks: ratios to named alternatives, measured in one run on one machine."""
