"""Kernels of the GPU target: the protocols of ``kernels/protocol``, in Triton, file for file as in ``kernels/cpu``."""
