"""Makespans of many configurations at once."""
