"""The checker: certificates derived again by other means than the engine's."""
