"""Lowering: translate a schedule table to a program, a graph of ops in arrays of integers."""
