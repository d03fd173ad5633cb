"""JAX runtime, which executes a table as one program on many devices."""
