"""The inference service: one engine, its weights, its cache, and the calls it answers."""
