"""One run of a table, and what it shows: times, bars, memory, weight versions."""
