"""Errors of the bus, with the fields that a caller needs to react."""

from tailrace_protos.generation import CallErrorCode


class BusError(Exception):
    """Base class of all errors of the bus."""


class BusClosedError(BusError):
    """The connection is closed for good; `reason` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"connection to NATS closed: {reason}")
        self.reason = reason


class OversizedMessageError(BusError, ValueError):
    """Message larger than the server accepts (it would close the connection)."""

    def __init__(self, subject: str, num_bytes: int, max_bytes: int) -> None:
        super().__init__(
            f"message for {subject!r} has {num_bytes} bytes, nats-server takes {max_bytes}: "
            "send it by claim check (tailrace.store.Blobs), or raise max_payload of nats-server"
        )
        self.subject = subject
        self.num_bytes = num_bytes
        self.max_bytes = max_bytes


class CallFailedError(BusError):
    """Error reply of a worker; a handler raises it to send an error reply."""

    def __init__(
        self, code: CallErrorCode, reason: str, retry_after_s: float = 0.0, *, subject: str = ""
    ) -> None:
        super().__init__(f"{f'{subject}: ' if subject else ''}{code.value}: {reason}")
        self.code = code
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.subject = subject


class NoResponderError(BusError):
    """No worker listens on `subject`; the request was not delivered."""

    def __init__(self, subject: str) -> None:
        super().__init__(f"no worker listens on {subject!r}")
        self.subject = subject


class CallTimeoutError(BusError, TimeoutError):
    """No reply within `timeout_s`; the worker may have executed the request."""

    def __init__(self, subject: str, timeout_s: float) -> None:
        super().__init__(f"no reply from {subject!r} within {timeout_s:g} s")
        self.subject = subject
        self.timeout_s = timeout_s


class StreamMissingError(BusError):
    """No stream stored the message within `waited_s`."""

    def __init__(self, subject: str, waited_s: float) -> None:
        super().__init__(
            f"no JetStream stream stores {subject!r} (waited {waited_s:g} s): the scheduler provisions "
            "a run's streams at its start; is it running, and does nats-server run with JetStream?"
        )
        self.subject = subject
        self.waited_s = waited_s


class PublishRefusedError(BusError):
    """JetStream refused a message for a permanent reason."""

    def __init__(self, subject: str, code: int, err_code: int, description: str) -> None:
        super().__init__(
            f"JetStream refused a message for {subject!r}: {description} ({code}/{err_code})"
        )
        self.subject = subject
        self.code = code
        self.err_code = err_code
        self.description = description
