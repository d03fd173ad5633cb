"""Local searches of the order of transfers, microbatches or workers, with a common driver."""
