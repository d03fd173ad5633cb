"""Models, their layouts on accelerators and pipeline stages, and workloads that combine both."""
