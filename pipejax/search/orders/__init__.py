"""Local searches of orders, of transfers, microbatches and workers, with one driver."""
