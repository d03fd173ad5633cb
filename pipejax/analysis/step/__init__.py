"""Training steps of models on systems: their time, its parts, many systems, and measured rows."""
