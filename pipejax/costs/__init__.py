"""Costs of ops, messages and memory, in seconds and bytes: measured, given or from a model.

Functions that return `Costs` take the source of the times, the table, then options by keyword.
"""
