"""What others published, against predictions: measured runs and closed forms."""
