"""Analysis of runs: what a table costs, why, how sure that is, and what others say of it."""
