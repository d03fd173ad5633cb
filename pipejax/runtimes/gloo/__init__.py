"""PyTorch's pipeline runtime on CPUs, its processes joined by gloo."""
