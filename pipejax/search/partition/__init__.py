"""The layers of every stage that make a step the shortest, with a proof."""
