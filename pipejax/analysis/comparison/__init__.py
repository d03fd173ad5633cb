"""Comparison of schedule tables: with papers' formulas, and cell by cell with other tables."""
