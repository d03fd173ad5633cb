"""Training steps of models on systems: predicted times, their parts, and measured runs."""
