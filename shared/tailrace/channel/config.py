"""The bounds of the generation channel: how big, how many, how long."""

from __future__ import annotations

from tailrace.config import Config


class ChannelConfig(Config, frozen=True, kw_only=True):
    """Bounds of one client or server of the generation channel.

    Clients and servers of a run should agree on `keepalive_s`, `silence_s` and `max_unconfirmed_bytes`.
    """

    frame_bytes: int = 131072
    """A frame is sent as soon as it holds this many bytes, before the end of the loop tick. Smaller
    frames let client and server work side by side, larger ones cost less per call."""

    max_outstanding_calls: int = 4096
    """Client: calls sent to one server and not finished; further calls wait for a free place."""

    max_waiting_calls: int = 16384
    """Client: calls that wait for a place at one server; further ones raise `ChannelFullError`."""

    max_unconfirmed_bytes: int = 4194304
    """Bytes of frames that one link has under way to a peer that has not confirmed them. Above it a
    client lets calls wait and a server lets the chunks of a call grow. nats-server cuts off who is 64
    MiB behind."""

    max_server_calls: int = 16384
    """Server: unfinished calls of all clients; further ones are answered `overloaded`."""

    chunk_tokens: int = 32
    """Server: tokens of a call that are sent on without waiting for `stream_interval_ms`."""

    stream_interval_ms: float = 20.0
    """Server: the longest time that sampled tokens of an unfinished call are held back."""

    keepalive_s: float = 1.0
    """A client with an open link sends an empty frame this often, and the server answers it."""

    silence_s: float = 10.0
    """Without any frame for this long the other side counts as dead: a client's calls raise
    `ChannelError`, a server aborts the calls of that client."""

    chunk_timeout_s: float = 600.0
    """Client: a call that gets no chunk for this long from a living server is given up."""

    idle_link_s: float = 60.0
    """Client: a link without calls for this long is closed."""

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
        """How many keepalive ticks `duration_s` is, at least one."""
        return max(1, round(duration_s / self.keepalive_s))


DEFAULTS = ChannelConfig()
