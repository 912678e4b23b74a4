"""The Numba target: primitives for kernels that run on CPU cores over shared memory."""
