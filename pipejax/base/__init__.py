"""Tools that do not depend on pipelines: array types, checks, units, files, longest paths."""
