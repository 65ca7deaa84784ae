"""Delete what shared servers hold of a run: `python -m tailrace_cli.commands.forget RUN`.

The chart runs it when a release on standing servers is removed. Pods may still end then, and write; it
deletes until nothing has come for `--quiet-s`.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence

import nats.errors
import nats.js.errors
from redis.asyncio import Redis
from redis.exceptions import RedisError

from tailrace.bus import Bus
from tailrace.config import ConfigError, Endpoints
from tailrace.log import configure, get_logger
from tailrace_cli.cluster.attached import ANSWER_WITHIN_S, keys_of, unlink
from tailrace_protos import subjects

log = get_logger(__name__)

_AGAIN_S = 1.0


async def forget(endpoints: Endpoints, run: str, quiet_s: float) -> int:
    """Delete keys and streams until none has been there for `quiet_s`; returns how many there were."""
    redis = Redis.from_url(endpoints.redis_url, socket_connect_timeout=ANSWER_WITHIN_S)
    bus = await Bus.connect(endpoints, name="cli")
    try:
        clock, total = asyncio.get_running_loop().time, 0
        since_s = clock()
        while True:
            if found := await _delete(bus, redis, run):
                total, since_s = total + found, clock()
            elif clock() >= since_s + quiet_s:
                return total
            await asyncio.sleep(min(_AGAIN_S, quiet_s))
    finally:
        await bus.close()
        await redis.aclose()


async def _delete(bus: Bus, redis: Redis, run: str) -> int:
    keys = await keys_of(redis, run)
    await unlink(redis, keys)
    num_streams = 0
    for stream in subjects.streams(run):
        try:
            num_streams += await bus.jetstream.delete_stream(stream)
        except nats.js.errors.NotFoundError:
            continue
    return len(keys) + num_streams


def main(argv: Sequence[str] | None = None) -> int:
    """Forget a run; exit code 1 if the servers do not answer, to be tried again."""
    parser = argparse.ArgumentParser(description="Delete what servers hold of a run.")
    parser.add_argument("run")
    parser.add_argument("--quiet-s", type=float, default=20.0, help="End after so long without a find.")
    options = parser.parse_args(argv)
    configure(service="cli", run=options.run)
    try:
        found = asyncio.run(forget(Endpoints.from_env(), options.run, options.quiet_s))
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except (RedisError, nats.errors.Error, nats.js.errors.Error, OSError) as error:
        log.warning("servers do not answer", error=str(error))
        return 1
    log.info("run forgotten", num_deleted=found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
