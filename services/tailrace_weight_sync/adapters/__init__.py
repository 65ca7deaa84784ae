"""Redis, shared memory with ZMQ, and snapshot files."""
