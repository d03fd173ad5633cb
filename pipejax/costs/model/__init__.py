"""Models, their layouts on jobs and pipelines, and workloads."""
