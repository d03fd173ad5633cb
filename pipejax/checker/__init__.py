"""The checker of certificates: plain Python that imports nothing else of the package."""
