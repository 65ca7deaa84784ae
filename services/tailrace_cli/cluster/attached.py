"""Servers that already run: are they there, and is the run's name still free on them?

Invariant: nothing is touched but what begins with the run's name, and that only with `--overwrite`.
"""

import asyncio
from collections.abc import Sequence

import msgspec
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from redis.asyncio import Redis
from redis.exceptions import RedisError

from tailrace.config import ConfigError
from tailrace.store.connection import without_credentials
from tailrace_protos import subjects

ANSWER_WITHIN_S = 15.0


class Attachment(msgspec.Struct, frozen=True):
    """Servers given by `--attach`; `overwrite`: what they hold of an earlier run may be deleted."""

    nats_url: str
    redis_url: str
    overwrite: bool = False


async def claim(attachment: Attachment, run: str, *, is_new: bool) -> None:
    """Return when both servers answer and hold nothing that a new run would mix with."""
    redis = Redis.from_url(
        attachment.redis_url, socket_connect_timeout=ANSWER_WITHIN_S, socket_timeout=ANSWER_WITHIN_S
    )
    client = await _connect(attachment.nats_url)
    try:
        await _claim(client, redis, attachment, run, is_new)
    except (nats.errors.Error, nats.js.errors.Error) as error:  # its timeout is an OSError, too
        raise ConfigError(
            f"NATS at {without_credentials(attachment.nats_url)} offers no JetStream ({error}): start "
            "it with -js, and let its user use it"
        ) from error
    except (RedisError, OSError) as error:
        raise ConfigError(
            f"no Redis answers at {without_credentials(attachment.redis_url)} ({error}): start it, or "
            "correct the second URL of --attach"
        ) from error
    finally:
        await client.close()
        await redis.aclose()


async def _connect(url: str) -> Client:
    seen = ["no answer"]

    async def note(error: Exception) -> None:
        seen.append(str(error) or type(error).__name__)

    client = Client()
    try:
        async with asyncio.timeout(ANSWER_WITHIN_S):
            await client.connect(url, allow_reconnect=False, error_cb=note)
    except (nats.errors.Error, OSError) as error:  # a timeout is an OSError
        await client.close()
        raise ConfigError(
            f"no NATS answers at {without_credentials(url)} ({seen[-1]}): start it, or correct the "
            "first URL of --attach"
        ) from error
    return client


async def _claim(client: Client, redis: Redis, attachment: Attachment, run: str, is_new: bool) -> None:
    await redis.ping()
    jetstream = client.jetstream()
    await jetstream.account_info()
    if not is_new:
        return
    streams = [info.config.name for info in await jetstream.streams_info_iterator()]
    old_streams = sorted({*subjects.streams(run)}.intersection(streams))
    old_keys = await keys_of(redis, run)
    if (old_streams or old_keys) and not attachment.overwrite:
        raise ConfigError(
            f"the servers of --attach hold an earlier run {run!r} ({len(old_streams)} streams, "
            f"{len(old_keys)} keys): choose another exp_name, or delete it with --overwrite"
        )
    for stream in old_streams:
        await jetstream.delete_stream(stream)
    await unlink(redis, old_keys)


async def keys_of(redis: Redis, run: str) -> list[bytes]:
    """All keys of a run."""
    return [key async for key in redis.scan_iter(subjects.redis_prefix(run) + "*", count=1000)]


async def unlink(redis: Redis, keys: Sequence[bytes]) -> None:
    """Delete keys, a thousand at a time."""
    for start in range(0, len(keys), 1000):
        await redis.unlink(*keys[start : start + 1000])
