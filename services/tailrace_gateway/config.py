"""Configuration of the gateway: the section `gateway` of an experiment file."""

from typing import Literal

from tailrace.channel.config import ClientChannelConfig
from tailrace.config import Config


class SessionDefaults(Config, frozen=True, kw_only=True):
    """Limits of a session opened over HTTP, for the fields that its request omits."""

    max_episode_tokens: int = 8192
    """Maximum length of each conversation in tokens, prompt and reply; the model's context length where
    that is less."""

    max_new_tokens: int = 4096
    """Maximum number of tokens sampled over all calls of the session."""

    timeout_s: float = 3600.0
    """Seconds until the session's deadline. No call of the gateway has a shorter timeout."""

    def __post_init__(self) -> None:
        for key in self.__struct_fields__:
            if getattr(self, key) <= 0:
                raise ValueError(f"{key} must be positive")


class GatewayConfig(Config, frozen=True, kw_only=True):
    """Gateway service. It reads its admin key from the environment variable
    `TAILRACE_GATEWAY_ADMIN_KEY`."""

    host: str = "127.0.0.1"
    """Address to listen on; a pod needs 0.0.0.0."""

    port: int = 0
    """Port that all replicas on this host share. 0: the port in `TAILRACE_GATEWAY_PORT` (the local
    cluster reserves a free one), else any free port, which other replicas do not share."""

    advertised_url: str = ""
    """Origin of a session's `base_url`, for example `http://gateway.my-namespace:8000`. Empty:
    `http://<host>:<port>`."""

    service_url: str = ""
    """Origin of the `base_url` that workflows and judges of the run's own services get, where these do
    not reach `advertised_url`: of a pod's Service beside an ingress. Empty: `advertised_url`."""

    max_body_bytes: int = 32 * 1024 * 1024
    """Maximum size of a request body; the gateway refuses larger bodies with 413."""

    max_concurrent_calls: int = 4096
    """Maximum number of model calls in flight in one replica; the gateway refuses more with 429 and
    `Retry-After`."""

    keep_alive_s: int = 600
    """Seconds after which the gateway closes an idle connection."""

    session_defaults: SessionDefaults = SessionDefaults()
    """Limits of sessions opened over HTTP."""

    session_keep_s: float = 3600.0
    """Seconds that a session stays in Redis after its deadline."""

    session_idle_s: float = 300.0
    """Seconds after which a replica drops an unused session from memory; the next call reads it from
    Redis."""

    store_timeout_s: float = 5.0
    """Seconds that a call waits for Redis. The gateway still answers a call that it cannot record in
    this time, but excludes its tokens from training."""

    on_broken_promise: Literal["refuse", "pass", "ask_again"] = "pass"
    """Rule for a reply that violates `tool_choice`, `parallel_tool_calls` or `response_format` of its
    request. `pass`: the client gets it, as from an engine without a grammar; most frameworks then tell
    the model or try again. `ask_again`: the gateway samples another reply to the same prompt; the
    violating one is trained with reward 0. `refuse`: error 422."""

    guided_decoding: Literal["auto", "off", "required"] = "auto"
    """Binding of replies to a required tool call or a response format while they are sampled. `auto`:
    where the engine and the model's format can; other replies are checked only, as `off` does for all
    (`on_broken_promise`). `required`: a call that cannot be guided is refused."""

    max_asks: int = 3
    """With `on_broken_promise: ask_again`: replies sampled at most for one choice. The last
    one passes."""

    max_generation_attempts: int = 10
    """Consecutive generation attempts without a new token after which a call fails with 503."""

    drain_s: float = 10.0
    """Seconds that calls in flight have to finish after SIGTERM. The gateway then ends them with 503,
    and clients retry at another replica."""

    transport: Literal["nats", "zmq"] = "zmq"
    """Transport of generation requests to the inference servers: `zmq` directly, `nats` through
    nats-server. The servers must offer it (`inference.transports`)."""

    channel: ClientChannelConfig = ClientChannelConfig()
    """Limits of the connection to the inference servers."""

    def __post_init__(self) -> None:
        for key in (
            "max_body_bytes",
            "max_concurrent_calls",
            "keep_alive_s",
            "session_keep_s",
            "session_idle_s",
            "store_timeout_s",
            "max_asks",
            "max_generation_attempts",
        ):
            if getattr(self, key) <= 0:
                raise ValueError(f"{key} must be positive")
        if self.drain_s < 0:
            raise ValueError("drain_s must not be negative")
        if not 0 <= self.port <= 65535:
            raise ValueError("port must be 0 to 65535")
