"""The published schedules, one small file each, with its source."""
