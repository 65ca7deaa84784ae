"""Comparison of scheduling policies in simulation."""
