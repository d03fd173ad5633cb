"""What all figures share: how schedules are drawn, and what a figure must keep to."""
