"""Analysis of runs: evaluation, metrics, memory, staleness, sensitivity, jitter."""
