"""What is trained, and how it is spread: models, layouts of jobs and pipelines, workloads."""
