"""What would make a step shorter: each remedy applied, and the run repeated."""
