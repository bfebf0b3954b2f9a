"""Expert parallelism: tokens are sent tier by tier to the ranks of their experts, and results back."""
