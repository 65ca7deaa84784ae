"""What a handler raises to tell the runtime something other than "I failed"."""

from __future__ import annotations


class HandBack(Exception):  # noqa: N818 - no error: the message is somebody else's turn
    """Give a pulled message back to its queue, for redelivery to anyone after `delay_s`.

    It is no failure: it does not bring the message nearer to being a dead letter.
    """

    def __init__(self, delay_s: float = 0.0) -> None:
        super().__init__(f"handed back for {delay_s:g} s")
        self.delay_s = delay_s


class StopService(Exception):  # noqa: N818 - an order, raised where going on makes no sense
    """End this service: drain, then exit with `exit_code`."""

    def __init__(self, exit_code: int, reason: str) -> None:
        super().__init__(reason)
        self.exit_code = exit_code
        self.reason = reason
