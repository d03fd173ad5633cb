"""Measured runs: read, checked, replayed and explained."""
