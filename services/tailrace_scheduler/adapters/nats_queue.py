"""The work queue of episodes and the stream of events in JetStream."""

from collections.abc import Sequence
from functools import partial

import msgspec
import nats.js.errors
from nats.aio.msg import Msg

from tailrace.bus import Bus, OversizedMessageError
from tailrace.bus.streams import retry_while_away
from tailrace.log import get_logger
from tailrace.tracing import episode
from tailrace_protos import subjects
from tailrace_protos.base import MalformedMessageError, decode, encode
from tailrace_protos.episode import EpisodeTask
from tailrace_protos.event import Event, EventBatch
from tailrace_protos.subjects import Phase

log = get_logger(__name__)

_READ_BATCH = 1000  # messages
_READ_TIMEOUT_S = 5.0
_SEQUENCE_HEADER = "Nats-Sequence"
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

    async def missing(self) -> list[str]:
        """Names of the run's streams and consumers that do not exist."""
        return await self._bus.missing_of_run(self._run)

    async def publish(self, tasks: Sequence[EpisodeTask]) -> None:
        """Return once all are stored."""
        await self._bus.publish_durable_many(
            [
                (subjects.episodes(self._run, task.phase), task, f"{self._run}.{task.message_id}")
                for task in tasks
            ],
            [episode(task.episode_id) for task in tasks],
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

    async def held(self, phase: Phase) -> dict[str, EpisodeTask]:
        """Tasks of all messages of the phase by episode id, a thousand in a round trip."""
        held: dict[str, EpisodeTask] = {}
        seq, is_more = 1, True
        while is_more:
            batch = partial(self._read, subjects.episodes(self._run, phase), seq)
            messages, is_more = await retry_while_away("list episodes", batch)
            for message in messages:
                seq = int((message.headers or {})[_SEQUENCE_HEADER]) + 1
                try:
                    task = decode(message.data, EpisodeTask)
                    held[task.episode_id] = task
                except MalformedMessageError as error:
                    log.error("malformed episode in the queue", seq=seq - 1, reason=str(error))
        return held

    async def _read(self, subject: str, seq: int) -> tuple[list[Msg], bool]:
        """Messages of the subject from `seq` on, and whether there are more."""
        client = self._bus.connection.client
        inbox = client.new_inbox()
        answers = await client.subscribe(inbox)
        ask = {"seq": seq, "batch": _READ_BATCH, "next_by_subj": subject}
        messages: list[Msg] = []
        try:
            api = f"$JS.API.DIRECT.GET.{self._stream}"
            await client.publish(api, msgspec.json.encode(ask), reply=inbox)
            while True:
                answer = await answers.next_msg(_READ_TIMEOUT_S)
                headers = answer.headers or {}
                if _SEQUENCE_HEADER not in headers:  # the end, or no (further) message
                    return messages, int(headers.get("Nats-Num-Pending", 0)) > 0
                messages.append(answer)
        finally:
            await answers.unsubscribe()

    async def announce(self, events: Sequence[Event]) -> None:
        """Publish one message for all events, or several where one would be too large.

        An event that fits into no message is left out: those who follow the run are views.
        """
        batch = EventBatch(tuple(events))
        if len(encode(batch)) > MAX_BATCH_BYTES and len(events) > 1:
            middle = len(events) // 2
            await self.announce(events[:middle])
            await self.announce(events[middle:])
            return
        message_id = f"{self._run}.events.{events[0].seq}:{events[-1].seq}"
        try:
            await self._bus.publish_durable(subjects.events(self._run), batch, message_id=message_id)
        except OversizedMessageError as error:
            log.error(
                "event too large to follow; events.jsonl has it", seq=events[0].seq, reason=str(error)
            )
