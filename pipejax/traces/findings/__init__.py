"""What follows from a replayed trace."""
