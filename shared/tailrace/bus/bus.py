"""`Bus`: all NATS traffic of one process, as messages instead of bytes."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext

from tailrace import metrics, tracing
from tailrace.bus.calls import Caller, ReplyInbox
from tailrace.bus.connection import Connection, Headers
from tailrace.bus.deliveries import DeadLetters
from tailrace.bus.durable import MESSAGE_ID_HEADER, DurablePublisher, Outgoing
from tailrace.bus.registry import Registry, StatusCallback
from tailrace.bus.streams import StreamLimits, provision
from tailrace.config import Endpoints
from tailrace.log import get_logger
from tailrace_protos.base import MalformedMessageError, Message, decode, encode
from tailrace_protos.control import ServerStatus

log = get_logger(__name__)

M = TypeVar("M")
R = TypeVar("R", bound=Message)


class Bus:
    """NATS connection of one process. Only the registry needs `run`."""

    def __init__(self, endpoints: Endpoints, *, name: str, run: str = "") -> None:
        self.connection = Connection(endpoints, name)
        self.run = run
        self._inbox = ReplyInbox(self.connection)
        self._caller = Caller(self.connection, self._inbox)
        self._publisher = DurablePublisher(self.connection, self._inbox)
        self.dead_letters = DeadLetters(self._publisher)
        self._registry: Registry | None = None

    @classmethod
    async def connect(cls, endpoints: Endpoints, *, name: str, run: str = "") -> "Bus":
        """Returns a connected bus, for code outside a `Service` (command line, tests)."""
        bus = cls(endpoints, name=name, run=run)
        await bus.start()
        return bus

    async def start(self) -> None:
        """Connects and waits for nats-server; `ConfigError` when it refuses the credentials."""
        await self.connection.open()
        await self._inbox.open()

    async def close(self) -> None:
        """Sends the buffered messages, then closes the connection."""
        await self.connection.close()

    @property
    def jetstream(self) -> JetStreamContext:
        """JetStream context of nats-py, for administration."""
        return self.connection.client.jetstream()

    # Calls and core publishes

    async def request(
        self,
        subject: str,
        message: object,
        reply_type: type[R],
        *,
        timeout_s: float,
        idempotent_retries: int = 0,
    ) -> R:
        """Calls a worker and returns its reply.

        After a timeout, an absent worker or a full worker it makes up to `idempotent_retries` more
        attempts, each with `timeout_s`. Leave it 0 for calls that must not run twice. Raises
        `CallFailedError`, `NoResponderError`, `CallTimeoutError`, `OversizedMessageError`,
        `MalformedMessageError`.
        """
        return await self._caller.request(subject, message, reply_type, timeout_s, idempotent_retries)

    async def publish(self, subject: str, message: object) -> None:
        """Publishes to the current subscribers; waits while nats-server is away."""
        await self.connection.publish(subject, encode(message), headers=_trace_headers())

    async def subscribe(
        self, subject: str, message_type: type[M], handler: Callable[[M], Awaitable[None]]
    ) -> Subscription:
        """Calls `handler` for each message, in order; logs and skips malformed messages.

        For code outside a `Service`: nats-py only logs an exception of `handler`.
        """

        async def on_message(message: Msg) -> None:
            try:
                decoded = decode(message.data, message_type)
            except MalformedMessageError as error:
                metrics.HANDLED.labels(f"subscribe:{subject}", "malformed").inc()
                log.error("malformed message skipped", subject=message.subject, error=str(error))
                return
            await handler(decoded)

        return await self.connection.subscribe(subject, on_message)

    # Durable publishes

    async def publish_durable(self, subject: str, message: object, *, message_id: str) -> None:
        """Returns once a stream has stored the message; waits while the stream is full or away.

        Raises `StreamMissingError` when no stream listens on `subject` for one minute.
        """
        await self.publish_durable_many([(subject, message, message_id)])

    async def publish_durable_many(self, items: Sequence[tuple[str, object, str]]) -> None:
        """Like `publish_durable` for many (subject, message, message id), without waits in between."""
        trace = _trace_headers() or {}
        await self._publisher.publish(
            [
                Outgoing(subject, encode(message), {MESSAGE_ID_HEADER: message_id, **trace})
                for subject, message, message_id in items
            ]
        )

    async def publish_copy(self, subject: str, payload: bytes, message_id: str) -> None:
        """Like `publish_durable`, for an encoded payload."""
        await self._publisher.publish([Outgoing(subject, payload, {MESSAGE_ID_HEADER: message_id})])

    # Streams

    async def provision_run(self, run: str, limits: StreamLimits | None = None) -> None:
        """Creates or updates the streams, consumers and registry of a run; idempotent."""
        await provision(self.jetstream, run, limits or StreamLimits())

    # Registry of inference servers

    @property
    def registry(self) -> Registry:
        """Registry of the run."""
        if self._registry is None:
            assert self.run, "a bus without a run has no registry"
            self._registry = Registry(self.connection, self.jetstream, self._publisher, self.run)
        return self._registry

    async def put_status(self, status: ServerStatus) -> None:
        """Writes the registry entry of an inference server."""
        await self.registry.put(status)

    async def statuses(self) -> list[ServerStatus]:
        """Returns all registry entries, sorted by server id."""
        return await self.registry.all()

    async def watch_statuses(self, callback: StatusCallback) -> None:
        """Awaits `callback(status)` for every entry now, and for each entry written later."""
        await self.registry.watch(callback)


def _trace_headers() -> Headers | None:
    traceparent = tracing.current_traceparent()
    return {tracing.HEADER: traceparent} if traceparent else None
