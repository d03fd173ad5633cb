"""PyTorch's pipeline runtime on CPUs, in processes that communicate by gloo."""
