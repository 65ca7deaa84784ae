"""Configuration of the gateway: the section `gateway` of an experiment file."""

from __future__ import annotations

from typing import Literal

from tailrace.channel.config import ClientChannelConfig
from tailrace.config import Config


class SessionDefaults(Config, frozen=True, kw_only=True):
    """What a session opened over HTTP gets where it does not say."""

    max_episode_tokens: int = 8192
    """Length of each of its conversations in tokens, inserted and sampled: at most the engine's
    context."""

    max_new_tokens: int = 4096
    """Tokens that it may sample over all its calls."""

    timeout_s: float = 3600.0
    """Seconds until its deadline. No call of the gateway has a shorter timeout."""

    def __post_init__(self) -> None:
        for key in self.__struct_fields__:
            if getattr(self, key) <= 0:
                raise ValueError(f"{key} must be positive")


class GatewayConfig(Config, frozen=True, kw_only=True):
    """The gateway service. Its admin key comes from the environment: `TAILRACE_GATEWAY_ADMIN_KEY`."""

    host: str = "127.0.0.1"
    """Address to listen on; a pod needs 0.0.0.0."""

    port: int = 0
    """Port that all replicas on this host share. 0: the one in `TAILRACE_GATEWAY_PORT` (the local
    cluster reserves a free one), else any free one, which no other replica shares."""

    advertised_url: str = ""
    """What `base_url` of a session begins with, for example `http://gateway.my-namespace:8000`.
    Empty: `http://<host>:<port>`."""

    max_body_bytes: int = 32 * 1024 * 1024
    """Larger request bodies are refused with 413."""

    max_concurrent_calls: int = 4096
    """Model calls in flight in one replica; more are refused with 429 and `Retry-After`."""

    keep_alive_s: int = 600
    """An idle connection is closed after so many seconds."""

    session_defaults: SessionDefaults = SessionDefaults()
    """Bounds of sessions opened over HTTP."""

    session_keep_s: float = 3600.0
    """How long a session stays in Redis after its deadline."""

    session_idle_s: float = 300.0
    """A session unused for so long is dropped from a replica's memory; its next call reads it again."""

    store_timeout_s: float = 5.0
    """How long a call waits for Redis. A reply that cannot be captured in time is answered, and its
    tokens are not trained."""

    max_generation_attempts: int = 10
    """Generation calls in a row that may fail without bringing a token before a call ends with 503."""

    drain_s: float = 10.0
    """At SIGTERM calls in flight have so long to end; then they are ended with 503, which clients
    retry elsewhere."""

    transport: Literal["nats", "zmq"] = "zmq"
    """How generation requests reach the inference servers: `zmq` directly, `nats` through nats-server.
    The servers must offer it (`inference.transports`)."""

    channel: ClientChannelConfig = ClientChannelConfig()
    """Bounds of the connection to the inference servers."""

    def __post_init__(self) -> None:
        for key in (
            "max_body_bytes",
            "max_concurrent_calls",
            "keep_alive_s",
            "session_keep_s",
            "session_idle_s",
            "store_timeout_s",
            "max_generation_attempts",
        ):
            if getattr(self, key) <= 0:
                raise ValueError(f"{key} must be positive")
        if self.drain_s < 0:
            raise ValueError("drain_s must not be negative")
        if not 0 <= self.port <= 65535:
            raise ValueError("port must be 0 to 65535")
