"""Numba kernels, one per file. A kernel's roles and edges are at the top of the file."""
