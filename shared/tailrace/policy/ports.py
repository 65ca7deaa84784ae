"""Interface of a policy to the scheduler."""

from typing import Protocol

from tailrace.channel.ports import Address


class ServerPlacement(Protocol):
    """Assigns servers to episodes."""

    async def lease(
        self, episode_id: str, predicted_tokens: int, failed_server_id: str = ""
    ) -> Address:
        """Returns a server for the episode, not `failed_server_id`; waits while none is healthy."""

    def report_call(self, server_id: str, succeeded: bool) -> None:
        """Reports a call of this server as succeeded or failed."""

    def release(self, episode_id: str) -> None:
        """Frees the lease of an ended episode."""
