"""Batches: groups become rows, rows become packed batches."""
