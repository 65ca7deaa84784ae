"""Parts of `make bench-weights`: the relay tree simulated, real servers, and updates of engines."""
