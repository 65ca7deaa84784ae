"""The work queue of episodes and the stream of events in JetStream."""

from collections.abc import Sequence

import nats.js.errors
from nats.js.api import RawStreamMsg

from tailrace.bus import Bus
from tailrace.bus.streams import retry_while_away
from tailrace.log import get_logger
from tailrace_protos import subjects
from tailrace_protos.base import MalformedMessageError, decode, encode
from tailrace_protos.episode import EpisodeTask
from tailrace_protos.event import Event, EventBatch
from tailrace_protos.subjects import Phase

log = get_logger(__name__)

MAX_BATCH_BYTES = 512 * 1024  # half of what nats-server takes by default


class NatsQueue:
    """The `EpisodeQueue` of one run."""

    def __init__(self, bus: Bus, run: str) -> None:
        self._bus = bus
        self._run = run
        self._stream = subjects.episodes_stream(run)

    async def provision(self) -> None:
        """Create or update the run's streams, consumers and registry."""
        await self._bus.provision_run(self._run)

    async def publish(self, tasks: Sequence[EpisodeTask]) -> None:
        """Return once all are stored."""
        await self._bus.publish_durable_many(
            [
                (subjects.episodes(self._run, task.phase), task, f"{self._run}.{task.message_id}")
                for task in tasks
            ]
        )

    async def count(self, phase: Phase) -> int | None:
        """Messages of the phase in the stream; None if it does not exist. Waits while NATS is away."""
        subject = subjects.episodes(self._run, phase)
        try:
            info = await retry_while_away(
                "count episodes",
                lambda: self._bus.jetstream.stream_info(self._stream, subjects_filter=subject),
            )
        except nats.js.errors.NotFoundError:
            return None
        return (info.state.subjects or {}).get(subject, 0)

    async def held(self, phase: Phase) -> set[str]:
        """Episode ids of all messages of the phase, read one by one."""
        subject = subjects.episodes(self._run, phase)
        held: set[str] = set()
        seq = 1
        while (message := await self._next(subject, seq)) is not None:
            assert message.seq is not None
            seq = message.seq + 1
            try:
                held.add(decode(message.data or b"", EpisodeTask).episode_id)
            except MalformedMessageError as error:
                log.error("malformed episode in the queue", seq=message.seq, reason=str(error))
        return held

    async def _next(self, subject: str, seq: int) -> RawStreamMsg | None:
        """The first message of the subject from `seq` on."""
        get = self._bus.jetstream.get_msg
        try:
            return await retry_while_away(
                "list episodes", lambda: get(self._stream, seq=seq, subject=subject, next=True)
            )
        except nats.js.errors.NotFoundError:
            return None

    async def announce(self, events: Sequence[Event]) -> None:
        """Publish one message for all events, or several where one would be too large."""
        batch = EventBatch(tuple(events))
        if len(encode(batch)) > MAX_BATCH_BYTES and len(events) > 1:
            middle = len(events) // 2
            await self.announce(events[:middle])
            await self.announce(events[middle:])
            return
        message_id = f"{self._run}.events.{events[0].seq}:{events[-1].seq}"
        await self._bus.publish_durable(subjects.events(self._run), batch, message_id=message_id)
