"""The `epcomm` command."""
