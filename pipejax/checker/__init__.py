"""The checker of certificates: plain Python, which imports nothing else of the package."""
