"""States that are kept below the device, and the ring in which they pass through it (docs/offload.md)."""
