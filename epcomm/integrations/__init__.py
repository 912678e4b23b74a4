"""Adapters that let frameworks run on epcomm unmodified; none is loaded unless asked for."""
