"""The engine: finish times of ops from a lowered schedule (integers) and its costs (seconds)."""
