"""Costs of a model's stages on a system: work, memory and times of all ops of a schedule."""
