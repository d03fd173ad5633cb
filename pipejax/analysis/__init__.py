"""What a run says: evaluations, metrics, memory, staleness, sensitivity, jitter."""
