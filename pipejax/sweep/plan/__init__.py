"""Plans: which layout of a training job on so many accelerators takes the shortest step."""
