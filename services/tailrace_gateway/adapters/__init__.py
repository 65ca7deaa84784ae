"""What the gateway's ports are at run time: HTTP, Redis."""
