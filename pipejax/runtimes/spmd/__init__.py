"""JAX runtime, which executes a table as one program on all devices."""
