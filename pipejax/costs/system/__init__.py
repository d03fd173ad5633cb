"""Machines: their numbers by name, from files, and rooflines of FLOP and bytes."""
