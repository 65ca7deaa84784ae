"""Implementations of the core's ports: NATS, Redis, the token channel, picture files."""
