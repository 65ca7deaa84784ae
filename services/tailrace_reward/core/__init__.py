"""Scores made of components, without bus or processes."""
