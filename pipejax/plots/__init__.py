"""The only room that imports matplotlib: arrays and evaluations in, drawings out."""
