"""Design studies on the library's own examples: networks, sensitivity, jitter, timelines."""
