"""Text generation: continuous batching over paged keys and values, with tensor-parallel replicas."""
