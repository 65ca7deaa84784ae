"""What a policy needs from outside."""

from __future__ import annotations

from typing import Protocol

from tailrace.channel.ports import Address


class Placement(Protocol):
    """Who generates an episode's turns."""

    async def lease(
        self, episode_id: str, predicted_tokens: int, failed_server_id: str = ""
    ) -> Address:
        """A server for the episode, after `failed_server_id` failed it; waits while none is healthy."""

    def report_call(self, server_id: str, succeeded: bool) -> None:
        """A call of this server ended."""

    def release(self, episode_id: str) -> None:
        """The episode ended."""
