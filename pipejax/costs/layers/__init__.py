"""What a layer is made of: kernels and collectives, with their FLOP, bytes and seconds."""
