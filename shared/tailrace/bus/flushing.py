"""Knowing that the server has taken what was sent, subscriptions included."""

from __future__ import annotations

from nats.aio.client import Client


async def flush(client: Client) -> None:
    """Return once the server has handled everything that `client` sent before.

    nats-py writes the ping of its own `flush` to the socket at once, ahead of what its flusher task has
    still to write, so the answer can come before a subscription is known. By then the flusher has
    written, and a second ping comes after it.
    """
    await client.flush()
    await client.flush()
