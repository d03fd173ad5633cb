"""PyTorch beside pipejax; warnings of PyTorch are its own."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
