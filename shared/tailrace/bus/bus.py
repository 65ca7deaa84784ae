"""`Bus`: all NATS traffic of one process, as messages instead of bytes."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import cached_property
from itertools import chain, repeat
from typing import TypeVar

import nats.js.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext

from tailrace import metrics
from tailrace.bus.calls import Caller, ReplyInbox
from tailrace.bus.connection import Connection
from tailrace.bus.durable import MESSAGE_ID_HEADER, DeadLetters, DurablePublisher, Outgoing
from tailrace.bus.streams import StreamLimits, missing, provision, retry_while_away
from tailrace.config import Endpoints
from tailrace.log import get_logger
from tailrace.tracing import headers
from tailrace_protos import subjects
from tailrace_protos.base import MalformedMessageError, Message, decode, encode
from tailrace_protos.control import ServerStatus

log = get_logger(__name__)

M = TypeVar("M")
R = TypeVar("R", bound=Message)
StatusCallback = Callable[[ServerStatus], Awaitable[None]]


class Registry:
    """Inference servers of a run: a key-value bucket, key = server id, value = `ServerStatus`.

    Servers rewrite their entry at each heartbeat. Readers check `heartbeat_unix_s`; NATS removes the
    entry of a silent server after `StreamLimits.max_status_age_s`.
    """

    def __init__(
        self, connection: Connection, jetstream: JetStreamContext, publisher: DurablePublisher, run: str
    ) -> None:
        self._connection = connection
        self._jetstream = jetstream
        self._publisher = publisher
        bucket = subjects.registry_bucket(run)
        self._stream = f"KV_{bucket}"
        self._prefix = f"$KV.{bucket}."

    async def put(self, status: ServerStatus) -> None:
        """Writes the entry of a server."""
        await self._publisher.publish([Outgoing(self._prefix + status.server_id, encode(status), {})])

    async def all(self) -> list[ServerStatus]:
        """Returns all entries, sorted by server id; none before the run is provisioned."""
        try:
            info = await retry_while_away(
                "read registry", lambda: self._jetstream.stream_info(self._stream, self._prefix + ">")
            )
        except nats.js.errors.NotFoundError:
            return []
        entries = await asyncio.gather(*(self._read(key) for key in sorted(info.state.subjects or {})))
        return [entry for entry in entries if entry is not None]

    async def watch(self, callback: StatusCallback) -> None:
        """Calls back with all entries now and after a reconnection, and with each new entry."""

        async def on_message(message: Msg) -> None:
            status = _decoded(message.data, message.subject)
            if status is not None:
                await callback(status)

        async def replay() -> None:
            for status in await self.all():
                await callback(status)

        replays: set[asyncio.Task[None]] = set()

        def on_replayed(task: asyncio.Task[None]) -> None:
            replays.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("registry not replayed", error=type(error).__name__, exc_info=error)

        def on_restored() -> None:
            task = asyncio.create_task(replay())
            replays.add(task)
            task.add_done_callback(on_replayed)

        await self._connection.subscribe(self._prefix + ">", on_message)
        self._connection.on_restored.append(on_restored)
        await replay()

    async def _read(self, subject: str) -> ServerStatus | None:
        try:
            raw = await retry_while_away(
                f"read {subject}",
                lambda: self._jetstream.get_last_msg(self._stream, subject, direct=True),
            )
        except nats.js.errors.NotFoundError:  # it expired after it was listed
            return None
        return _decoded(raw.data or b"", subject)


def _decoded(data: bytes, subject: str) -> ServerStatus | None:
    try:
        return decode(data, ServerStatus)
    except MalformedMessageError as error:
        log.error("malformed registry entry ignored", subject=subject, error=str(error))
        return None


class Bus:
    """NATS connection of one process. Only the registry needs `run`."""

    def __init__(self, endpoints: Endpoints, *, name: str, run: str = "") -> None:
        self.connection = Connection(endpoints, name)
        self.run = run
        self._inbox = ReplyInbox(self.connection)
        self._caller = Caller(self.connection, self._inbox)
        self._publisher = DurablePublisher(self.connection, self._inbox)
        self.dead_letters = DeadLetters(self._publisher)

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

        After a timeout, an absent worker or an error aside from INVALID it makes up to
        `idempotent_retries` more attempts, each with `timeout_s`. Leave it 0 for calls that must not
        run twice. Raises `CallFailedError`, `NoResponderError`, `CallTimeoutError`,
        `OversizedMessageError`, `MalformedMessageError`.
        """
        return await self._caller.request(subject, message, reply_type, timeout_s, idempotent_retries)

    async def publish(self, subject: str, message: object) -> None:
        """Publishes to the current subscribers; waits while nats-server is away."""
        await self.connection.publish(subject, encode(message), headers=headers())

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

    async def publish_durable_many(
        self, items: Sequence[tuple[str, object, str]], traceparents: Sequence[str] = ()
    ) -> None:
        """Like `publish_durable` for many (subject, message, message id), without waits in between.

        Each item belongs to the current trace, or to its own one of `traceparents`.
        """
        traces = chain(traceparents, repeat(""))
        await self._publisher.publish(
            [
                Outgoing(subject, encode(message), {MESSAGE_ID_HEADER: message_id, **headers(trace)})
                for (subject, message, message_id), trace in zip(items, traces, strict=False)
            ]
        )

    async def publish_copy(
        self, subject: str, payload: bytes, message_id: str, traceparent: str
    ) -> None:
        """Like `publish_durable`, for an encoded payload, which stays in its trace."""
        of_copy = {MESSAGE_ID_HEADER: message_id, **headers(traceparent)}
        await self._publisher.publish([Outgoing(subject, payload, of_copy)])

    # Streams

    async def provision_run(self, run: str, limits: StreamLimits | None = None) -> None:
        """Creates or updates the streams, consumers and registry of a run; idempotent."""
        await provision(self.jetstream, run, limits or StreamLimits())

    async def missing_of_run(self, run: str) -> list[str]:
        """Returns the names of the run's streams and consumers that do not exist."""
        return await missing(self.jetstream, run)

    # Registry of inference servers

    @cached_property
    def registry(self) -> Registry:
        """Registry of the run."""
        assert self.run, "a bus without a run has no registry"
        return Registry(self.connection, self.jetstream, self._publisher, self.run)
