"""Adapters of the autoscaler."""
