"""Everything that knows nothing of pipelines: array types, checks, units, files, longest paths."""
