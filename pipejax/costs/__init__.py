"""Costs of ops, messages and memory, in seconds and bytes: measured, given or from a model.

What makes `Costs` has one order of arguments: where the times come from, the table, then options
by keyword.
"""
