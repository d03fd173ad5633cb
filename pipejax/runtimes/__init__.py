"""Runtimes that execute tables with a small model, and exports of tables for other runtimes."""
