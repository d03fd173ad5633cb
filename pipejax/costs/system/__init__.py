"""Machines: their numbers by name, from files, and what rooflines make of FLOP and bytes."""
