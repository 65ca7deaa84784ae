"""Optimizers, one per file. Each is a function that makes a torch optimizer, and its declaration."""
