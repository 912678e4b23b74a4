"""How long plans take on machines, without running them: event by event, or in rounds for worlds of any size.

Units everywhere: bytes, microseconds, GB/s of 1e9 bytes, one direction.
"""
