"""Kernels and collectives of a transformer layer: FLOP, bytes and seconds of each."""
