"""Expert parallelism: tokens go to the ranks that own their experts, and the experts' outputs come back."""
