"""What the core's ports are at run time: NATS, Redis, the token channel, picture files."""
