"""Symmetric memory: segments that every rank maps, and arithmetic for what lies where in them."""
