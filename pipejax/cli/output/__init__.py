"""Numbers, rows and files as they leave the command line."""
