"""Search for the layers of every stage with the shortest step, with a proof."""
