"""General tools, independent of pipelines: array types, checks, units, files, longest paths."""
