"""Decisions of the autoscaler, pure."""
