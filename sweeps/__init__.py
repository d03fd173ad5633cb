"""Sweeps: each declares a grid and writes a labelled dataset. A sweep never draws."""
