"""Errors of a call, with the fields that a caller needs to continue.

`ChannelError` and its subclass are failures of the infrastructure and carry the tokens received so far.
`generate` itself raises the others, before it sends anything.
"""

from tailrace.channel.generation import Generation
from tailrace_protos.generation import CallError, CallErrorCode


class ChannelError(RuntimeError):
    """The call ended without its last chunk; `partial` holds the tokens received, a prefix.

    A caller continues at another server with `prompt_ids + partial.token_ids` and `num_continued`.
    """

    def __init__(self, server_id: str, reason: str, partial: Generation) -> None:
        super().__init__(f"call to {server_id} failed after {partial.num_tokens} tokens: {reason}")
        self.server_id = server_id
        self.reason = reason
        self.partial = partial


class GenerateRefusedError(ChannelError):
    """Error reply of the server; `code` and `retry_after_s` say where and when to retry.

    `limit_tokens` is the longest sequence of a server that refuses a prompt as too long.
    """

    def __init__(self, server_id: str, error: CallError, partial: Generation) -> None:
        super().__init__(server_id, f"{error.code.value}: {error.reason}", partial)
        self.code: CallErrorCode = error.code
        self.retry_after_s = error.retry_after_s
        self.limit_tokens = error.limit_tokens


class OversizeRequestError(ValueError):
    """Request larger than a frame."""

    def __init__(self, call_id: str, num_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"call {call_id}: request has {num_bytes} bytes, the channel takes {limit_bytes}: "
            "shorten the prompt, or over NATS raise max_payload of nats-server"
        )
        self.call_id = call_id
        self.num_bytes = num_bytes
        self.limit_bytes = limit_bytes


class DuplicateCallError(ValueError):
    """Id of a call that has not ended yet at this server."""

    def __init__(self, call_id: str, server_id: str) -> None:
        super().__init__(
            f"call {call_id} to {server_id} has not ended yet: "
            "await it (an aborted call too), or use a new id"
        )
        self.call_id = call_id
        self.server_id = server_id


class ChannelFullError(RuntimeError):
    """More calls wait for this server than `max_waiting_calls`."""

    def __init__(self, server_id: str, num_waiting: int) -> None:
        super().__init__(
            f"{num_waiting} calls already wait for {server_id}: run fewer episodes in this process, "
            "add servers, or raise max_waiting_calls"
        )
        self.server_id = server_id
        self.num_waiting = num_waiting


class ChannelClosedError(RuntimeError):
    """Call of `generate` after `close`."""

    def __init__(self) -> None:
        super().__init__("the generation channel of this process is closed")


class NoRouteError(ValueError):
    """Server without an endpoint for this client's transport."""

    def __init__(self, server_id: str, transport: str) -> None:
        super().__init__(
            f"server {server_id} has no {transport} endpoint: "
            "start it with that transport, or use another here"
        )
        self.server_id = server_id
        self.transport = transport


class EndpointError(ValueError):
    """ZMQ endpoint that cannot be bound."""

    def __init__(self, endpoint: str, reason: str) -> None:
        super().__init__(
            f"cannot listen on {endpoint!r}: {reason}; use "
            "ipc:///<path of at most 107 characters in an existing directory> or "
            "tcp://<interface>:* for a free port"
        )
        self.endpoint = endpoint
        self.reason = reason
