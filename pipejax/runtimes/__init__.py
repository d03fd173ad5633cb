"""Runtimes that execute tables with a small model, and writers of tables for other runtimes."""
