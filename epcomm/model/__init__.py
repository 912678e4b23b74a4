"""What the hardware allows: floors of dispatch, combine and allreduce on GPUs, beside what others have published.

Units everywhere: bytes, microseconds, GB/s of 1e9 bytes, one direction. Nothing here was measured by this project.
"""
