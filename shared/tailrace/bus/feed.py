"""Steady feed from a JetStream pull consumer: requests as many messages as there is room for.

Invariants: at most `room` messages are requested and not yet received; a request costs one publish per
batch; a request that the server lost (restart, deleted consumer) is detected and repeated.
"""

import asyncio
from collections.abc import Callable

import msgspec
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from tailrace.bus.connection import Connection
from tailrace.log import get_logger
from tailrace.retry import Backoff

log = get_logger(__name__)

REQUEST_LIFE_S = 10.0  # the server answers 408 to a request that is unfilled after this time
GRACE_S = 3.0
PENDING_HEADER = "Nats-Pending-Messages"


class PullFeed:
    """Requests messages of one durable consumer and passes them to `receive`, in order.

    Calls `expired` when a request ended unfilled; the owner can then ask again.
    """

    def __init__(
        self,
        connection: Connection,
        stream: str,
        durable: str,
        receive: Callable[[Msg], None],
        expired: Callable[[], None],
    ) -> None:
        self.name = f"{stream}/{durable}"
        self._connection = connection
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{durable}"
        self._receive = receive
        self._expired = expired
        self._inbox = ""
        self._subscription: Subscription | None = None
        self._outstanding = 0  # requested, not yet received
        self._asked_s = 0.0  # time of the last request
        self._paused_until_s = 0.0
        self._backoff = Backoff(0.2, 3.0)

    async def open(self) -> None:
        """Subscribes to the inbox of the feed."""
        self._inbox = self._connection.client.new_inbox()
        self._subscription = await self._connection.subscribe(self._inbox, self._on_message)
        self._connection.on_lost.append(self.forget)

    async def close(self) -> None:
        """Ends the feed; messages that arrived before have been passed to `receive`."""
        if self._subscription is not None:
            self._connection.on_lost.remove(self.forget)
            await self._connection.drain(self._subscription)

    def forget(self) -> None:
        """Resets the count of requested messages: the server has lost the requests."""
        self._outstanding = 0

    async def ask(self, room: int) -> None:
        """Requests the messages missing to `room`, if they are enough for a request."""
        now_s = asyncio.get_running_loop().time()
        if self._outstanding and now_s - self._asked_s > REQUEST_LIFE_S + GRACE_S:
            self.forget()
        missing = room - self._outstanding
        is_worth_it = missing > 0 and (self._outstanding == 0 or missing * 4 >= room)
        if not is_worth_it or now_s < self._paused_until_s or not self._connection.is_connected:
            return
        self._outstanding += missing
        self._asked_s = now_s
        request = {"batch": missing, "expires": int(REQUEST_LIFE_S * 1e9)}
        await self._connection.publish(self._subject, msgspec.json.encode(request), reply=self._inbox)

    async def _on_message(self, message: Msg) -> None:
        if message.reply:
            self._outstanding = max(0, self._outstanding - 1)
            self._backoff.reset()
            self._receive(message)
            return
        self._on_status(message.headers or {})

    def _on_status(self, headers: dict[str, str]) -> None:
        status, description = headers.get("Status", ""), headers.get("Description", "")
        unfilled = int(headers.get(PENDING_HEADER) or self._outstanding)
        self._outstanding = max(0, self._outstanding - unfilled)
        if status in ("408", "404") or description == "Batch Completed":
            self._expired()
            return
        if self._backoff.num_failures % 10 == 0:
            why = "no such consumer yet" if status == "503" else f"{status} {description}".strip()
            log.warning("pull waits", consumer=self.name, reason=why)
        self._paused_until_s = asyncio.get_running_loop().time() + self._backoff.next_s()
