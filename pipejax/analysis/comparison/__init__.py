"""Comparison of tables: metrics, published closed forms, cells that differ."""
