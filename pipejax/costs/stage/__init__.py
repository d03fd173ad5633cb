"""What the layers of a stage cost in all: its work, its memory, and the costs of a schedule."""
