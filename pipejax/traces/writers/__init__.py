"""What a replayed trace becomes: tables, costs, datasets, traces for Perfetto."""
