"""Plans: the layout of a training job with the shortest step."""
