"""Errors of the store, with the fields that a caller needs to react."""

import msgspec

from tailrace.config import ConfigError

MALFORMED = (msgspec.MsgspecError, ValueError, TypeError, LookupError, RecursionError)
"""Errors of decoding bytes that are not what was written."""


class StoreError(Exception):
    """Redis refused a command for a permanent reason."""


class StoreFullError(StoreError):
    """Redis has no room to write; nothing was changed.

    Attributes: `reason` (text of Redis).
    """

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"Redis cannot write: {reason}. Remedy: raise its `maxmemory` or free space on the disk of "
            "its data directory, or checkpoint more often (`save_steps`), so that it keeps less"
        )
        self.reason = reason


class StoreUnavailableError(StoreError):
    """Redis did not answer within the time limit of its caller.

    Attributes: `url` (without credentials), `waited_s`, `reason` (the last failure).
    """

    def __init__(self, url: str, waited_s: float, reason: str) -> None:
        super().__init__(
            f"Redis at {url} did not answer for {waited_s:.3g} s ({reason}). Remedy: start it, or "
            "correct TAILRACE_REDIS_URL"
        )
        self.url = url
        self.waited_s = waited_s
        self.reason = reason


class StoreRefusedError(StoreError, ConfigError):
    """Redis refuses the credentials.

    Attributes: `url` (without credentials), `reason` (text of Redis).
    """

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(
            f"Redis at {url} refused the connection: {reason}. Remedy: correct user and password in "
            "TAILRACE_REDIS_URL (redis://user:password@host:port/0)"
        )
        self.url = url
        self.reason = reason


class BlobGoneError(StoreError):
    """Payload that expired or never existed.

    Attributes: `ref`.
    """

    def __init__(self, ref: str) -> None:
        super().__init__(f"no payload is kept under {ref!r}: it expired, or belongs to another run")
        self.ref = ref
