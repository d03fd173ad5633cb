"""A table as one program for many devices under JAX."""
