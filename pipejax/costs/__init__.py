"""Everything measured in seconds and bytes."""
