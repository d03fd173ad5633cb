"""The checker of certificates: plain Python without imports from the rest of the package."""
