"""Redis, shared memory with ZMQ, and the state directory."""
