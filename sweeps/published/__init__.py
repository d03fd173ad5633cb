"""Published measured runs and closed forms, against predictions."""
