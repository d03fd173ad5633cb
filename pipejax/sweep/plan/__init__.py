"""Plans: search for the layout of a training job that has the shortest step."""
