"""One file for each form that traces come in."""
