"""PyTorch's pipeline runtime on CPUs, with processes that communicate by gloo."""
