"""Reads Prometheus samples of this process."""

from __future__ import annotations

from prometheus_client import REGISTRY


def sample(name: str, **labels: str) -> float:
    """The sample's value now; 0 before it exists."""
    return REGISTRY.get_sample_value(name, labels) or 0.0
