"""Parts of `make bench-weights`: the relay tree simulated, real servers, and pauses of engines."""
