"""The Triton target. One source, compiled for a GPU or run by Triton's interpreter on CPU memory."""
