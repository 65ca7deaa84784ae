"""Limits of the generation channel: sizes, numbers of calls and times, of a client and of a server."""

from tailrace.config import Config


class ChannelConfig(Config, frozen=True, kw_only=True):
    """Limits that a client and a server of the generation channel both have.

    Clients and servers of a run should agree on `keepalive_s`, `silence_s` and `max_unconfirmed_bytes`.
    """

    frame_bytes: int = 131072
    """A frame leaves as soon as it holds this many bytes, before the end of the loop tick. Smaller
    frames let client and server work side by side, larger ones cost less per call."""

    max_unconfirmed_bytes: int = 4194304
    """Bytes of frames in flight on one link that the other side has not confirmed. Above it a client
    makes calls wait, and a server lets the chunks of a call grow. nats-server disconnects a reader
    that is 64 MiB behind."""

    keepalive_s: float = 1.0
    """Seconds between the empty frames that a client sends on an open link and the server answers."""

    silence_s: float = 10.0
    """Seconds without any frame after which the other side counts as dead: the calls of a client raise
    `ChannelError`, a server aborts the calls of that client."""

    def __post_init__(self) -> None:
        for key in self.__struct_fields__:
            if getattr(self, key) <= 0:
                raise ValueError(f"{key} must be positive")
        if self.silence_s < 2 * self.keepalive_s:
            raise ValueError(
                f"silence_s ({self.silence_s:g}) must be at least twice keepalive_s "
                f"({self.keepalive_s:g}): one late keepalive would count as a death"
            )

    def ticks(self, duration_s: float) -> int:
        """Number of keepalive ticks in `duration_s`, at least one."""
        return max(1, round(duration_s / self.keepalive_s))


class ClientChannelConfig(ChannelConfig, frozen=True, kw_only=True):
    """Limits of a client of the generation channel: an agents worker or a gateway."""

    max_outstanding_calls: int = 4096
    """Unfinished calls at one server; further calls wait for a free place."""

    max_waiting_calls: int = 16384
    """Calls that wait for a place at one server; further ones raise `ChannelFullError`."""

    chunk_timeout_s: float = 600.0
    """Seconds without a chunk after which the client gives up a call to a living server."""

    idle_link_s: float = 60.0
    """Seconds without calls after which the client closes a link."""


class ServerChannelConfig(ChannelConfig, frozen=True, kw_only=True):
    """Limits of a server of the generation channel."""

    max_server_calls: int = 16384
    """Unfinished calls of all clients; the server answers further ones `overloaded`."""


CLIENT_DEFAULTS = ClientChannelConfig()
SERVER_DEFAULTS = ServerChannelConfig()
