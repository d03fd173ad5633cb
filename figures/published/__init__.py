"""The figure of published runs against predictions."""
