"""Surfaces of other libraries on epcomm: each lets code that was written for one of them run on it."""
