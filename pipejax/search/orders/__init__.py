"""What stands in which order: transfers, microbatches, workers. Local searches with one driver."""
