"""Registry of inference servers: a key-value bucket, key = server id, value = `ServerStatus`.

Servers rewrite their entry at each heartbeat. Readers check `heartbeat_unix_s`; NATS removes the entry
of a silent server after `StreamLimits.max_status_age_s`.
"""

import asyncio
from collections.abc import Awaitable, Callable

import nats.js.errors
from nats.aio.msg import Msg
from nats.js import JetStreamContext

from tailrace.bus.connection import Connection
from tailrace.bus.durable import DurablePublisher, Outgoing
from tailrace.bus.streams import retry_while_away
from tailrace.log import get_logger
from tailrace_protos import subjects
from tailrace_protos.base import MalformedMessageError, decode, encode
from tailrace_protos.control import ServerStatus

log = get_logger(__name__)

StatusCallback = Callable[[ServerStatus], Awaitable[None]]


class Registry:
    """Registry of one run."""

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

        def on_restored() -> None:
            task = asyncio.create_task(replay())
            replays.add(task)
            task.add_done_callback(replays.discard)

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
