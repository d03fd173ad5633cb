"""A single run of a table: its times, bars for drawings, memory and weight versions."""
