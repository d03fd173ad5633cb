"""Which link models a machine follows, from measured step times."""
