"""Standard collectives: semantics and validation here, kernels below."""
