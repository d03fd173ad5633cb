"""Readers of traces, with one module for each file format."""
