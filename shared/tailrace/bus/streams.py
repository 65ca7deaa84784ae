"""Streams, consumers and bucket of a run, with their limits.

`provision` is idempotent: it creates missing streams and updates changed limits. A change that
JetStream cannot make in place (a work queue stays a work queue) is an error with the remedy.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import msgspec
import nats.errors
import nats.js.errors
from nats.js import JetStreamContext
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DiscardPolicy,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)

from tailrace.config import ConfigError
from tailrace.log import get_logger
from tailrace.retry import Backoff
from tailrace_protos import subjects

log = get_logger(__name__)

DEDUP_WINDOW_S = 120.0
OTHER_CONFIG = 10058  # "stream name already in use with a different configuration"
# Episodes of a dead worker wait so long: NATS redelivers what had no heartbeat.
ACK_WAIT_S = 10.0
NO_STORAGE = (10023, 10047)  # the bounds of all streams add up to more than the server may use
DAY_S = 24 * 3600.0
MIB = 1 << 20


class StreamLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the streams of a run."""

    max_queued_episodes: int = 100_000  # of both phases; the scheduler waits while the queue is full
    max_ack_pending: int = 20_000  # running episodes of one phase, over all workers
    ack_wait_s: float = ACK_WAIT_S
    max_event_bytes: int = 1024 * MIB
    max_event_age_s: float = 7 * DAY_S
    max_dead_bytes: int = 256 * MIB
    max_dead_age_s: float = 30 * DAY_S
    max_status_age_s: float = 3600.0  # entries of silent servers expire


T = TypeVar("T")


async def retry_while_away(name: str, call: Callable[[], Awaitable[T]]) -> T:
    """Repeats an idempotent JetStream call while the server is away or not ready."""
    backoff = Backoff(0.1, 2.0)
    while True:
        try:
            return await call()
        except (
            nats.errors.TimeoutError,
            nats.errors.NoRespondersError,
            nats.errors.OutboundBufferLimitError,
            nats.js.errors.NoStreamResponseError,
            nats.js.errors.ServiceUnavailableError,
        ) as error:
            if backoff.num_failures % 10 == 0:
                log.warning(
                    "jetstream not available yet", call=name, error=str(error) or type(error).__name__
                )
            await backoff.sleep()


async def provision(jetstream: JetStreamContext, run: str, limits: StreamLimits) -> None:
    """Creates or updates the streams, consumers and bucket of a run."""
    for stream in _streams(run, limits):
        await ensure_stream(jetstream, stream)
    await asyncio.gather(
        *(
            ensure_consumer(
                jetstream,
                subjects.episodes_stream(run),
                phase,
                filter_subject=subjects.episodes(run, phase),
                ack_wait_s=limits.ack_wait_s,
                max_ack_pending=limits.max_ack_pending,
            )
            for phase in subjects.PHASES
        )
    )


async def missing(jetstream: JetStreamContext, run: str) -> list[str]:
    """Returns the names of the run's streams and consumers that do not exist."""
    queue = subjects.episodes_stream(run)
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        name: partial(jetstream.stream_info, name) for name in subjects.streams(run)
    }
    for phase in subjects.PHASES:
        calls[f"{queue}/{phase}"] = partial(jetstream.consumer_info, queue, phase)
    found = await asyncio.gather(*(_exists(name, call) for name, call in calls.items()))
    return [name for name, exists in zip(calls, found, strict=True) if not exists]


async def _exists(name: str, info: Callable[[], Awaitable[object]]) -> bool:
    try:
        await retry_while_away(f"look for {name}", info)
    except nats.js.errors.NotFoundError:
        return False
    return True


async def ensure_stream(jetstream: JetStreamContext, config: StreamConfig) -> None:
    """Creates or updates one stream; `ConfigError` when JetStream cannot update it."""
    try:
        await retry_while_away(f"create {config.name}", lambda: jetstream.add_stream(config))
    except nats.js.errors.BadRequestError as error:
        if error.err_code != OTHER_CONFIG:
            raise _unusable(config, error) from error
    except nats.js.errors.APIError as error:
        if error.err_code not in NO_STORAGE:
            raise
        raise ConfigError(
            f"JetStream has no storage for stream {config.name} ({error.description}): free space on "
            "the disk of its store directory, or raise max_file_store of nats-server"
        ) from error
    else:
        return
    try:
        await retry_while_away(f"update {config.name}", lambda: jetstream.update_stream(config))
    except nats.js.errors.APIError as error:
        raise _unusable(config, error) from error
    log.info("stream updated", stream=config.name)


def _unusable(config: StreamConfig, error: nats.js.errors.APIError) -> ConfigError:
    return ConfigError(
        f"JetStream refuses stream {config.name}: {error.description}; choose another exp_name, or "
        f"remove the old stream with `nats stream rm {config.name}` if its run is over"
    )


async def ensure_consumer(
    jetstream: JetStreamContext,
    stream: str,
    durable: str,
    *,
    filter_subject: str,
    ack_wait_s: float = ACK_WAIT_S,
    max_ack_pending: int = 1000,
) -> None:
    """Creates or updates one durable pull consumer; workers limit its deliveries themselves."""
    config = ConsumerConfig(
        durable_name=durable,
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=ack_wait_s,
        max_ack_pending=max_ack_pending,
        max_deliver=-1,
        filter_subject=filter_subject,
    )
    await retry_while_away(f"create {stream}/{durable}", lambda: jetstream.add_consumer(stream, config))


def _streams(run: str, limits: StreamLimits) -> list[StreamConfig]:
    bucket = subjects.registry_bucket(run)
    return [
        StreamConfig(
            name=subjects.episodes_stream(run),
            description="Episodes to play: one message each, removed once acknowledged.",
            subjects=[subjects.episodes(run, phase) for phase in subjects.PHASES],
            retention=RetentionPolicy.WORK_QUEUE,
            discard=DiscardPolicy.NEW,
            max_msgs=limits.max_queued_episodes,
            storage=StorageType.FILE,
            allow_direct=True,
            duplicate_window=DEDUP_WINDOW_S,
        ),
        StreamConfig(
            name=subjects.events_stream(run),
            description="Events of the run.",
            subjects=[subjects.events(run)],
            retention=RetentionPolicy.LIMITS,
            max_bytes=limits.max_event_bytes,
            max_age=limits.max_event_age_s,
            storage=StorageType.FILE,
            duplicate_window=DEDUP_WINDOW_S,
        ),
        StreamConfig(
            name=subjects.dead_stream(run),
            description="Messages that no worker could handle, with the reason in headers.",
            subjects=[f"{run}.dead.>"],
            retention=RetentionPolicy.LIMITS,
            max_bytes=limits.max_dead_bytes,
            max_age=limits.max_dead_age_s,
            storage=StorageType.FILE,
            duplicate_window=DEDUP_WINDOW_S,
        ),
        StreamConfig(
            name=f"KV_{bucket}",
            description="Registry of inference servers.",
            subjects=[f"$KV.{bucket}.>"],
            max_msgs_per_subject=1,
            max_age=limits.max_status_age_s,
            discard=DiscardPolicy.NEW,
            storage=StorageType.FILE,
            allow_rollup_hdrs=True,
            deny_delete=True,
            allow_direct=True,
            duplicate_window=DEDUP_WINDOW_S,
        ),
    ]
