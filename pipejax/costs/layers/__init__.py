"""Kernels and collectives of a layer, with their FLOP, bytes and seconds."""
