"""Connection to Redis that all parts of the store share.

One `AutoPipeline` carries all commands that do not block; waits for new stream entries use separate
connections. Both reconnect after an outage.
"""

import asyncio
from urllib.parse import urlsplit, urlunsplit

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ResponseError

from tailrace.store.errors import StoreRefusedError, StoreUnavailableError
from tailrace.store.pipeline import CONNECTION_LOST, Argument, AutoPipeline, passes

_LONGEST_WAIT_S = 5.0


class StoreConnection:
    """Open store; `connect` opens it and `aclose` closes it."""

    def __init__(
        self,
        url: str,
        *,
        outage_s: float = 300.0,
        full_s: float = 300.0,
        deadline_s: float | None = None,
    ) -> None:
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=16,
            timeout=None,
            socket_timeout=_LONGEST_WAIT_S + 5.0,
            socket_connect_timeout=5.0,
            socket_keepalive=True,
            decode_responses=False,
            protocol=2,
            retry=Retry(NoBackoff(), 0),
        )
        self.url = without_credentials(url)
        self.redis = Redis(connection_pool=pool)
        # The pipeline has its own timeouts; with a timeout, redis-py creates a task for each write.
        own = pool.connection_class(**{**pool.connection_kwargs, "socket_timeout": None})
        self.pipeline = AutoPipeline(
            own, self.url, outage_s=outage_s, full_s=full_s, deadline_s=deadline_s
        )

    async def ping(self) -> None:
        """Returns once Redis has answered."""
        await self.pipeline.command("PING")

    async def wait_for_entry(self, stream: str, after: str, block_s: float) -> None:
        """Returns when `stream` has entries beyond `after`, after `block_s`, or when Redis is away."""
        if block_s <= 0:
            return
        wait_ms = max(1, int(min(block_s, _LONGEST_WAIT_S) * 1000))
        try:
            await self.redis.xread({stream: after}, count=1, block=wait_ms)
        except (*CONNECTION_LOST, ResponseError) as error:
            if isinstance(error, ResponseError) and not passes(error):
                raise
            await asyncio.sleep(min(block_s, 0.05))

    async def command(self, *arguments: Argument) -> object:
        """Runs a repeatable command that does not block, in the pipeline."""
        answer: object = await self.pipeline.command(*arguments)
        return answer

    async def read_hash(self, key: str) -> dict[bytes, bytes]:
        """Returns all fields of a hash; empty if the hash does not exist."""
        flat = await self.pipeline.command("HGETALL", key)
        return dict(zip(flat[::2], flat[1::2], strict=True))

    async def aclose(self) -> None:
        """Closes all connections and cancels pending commands."""
        await self.pipeline.close()
        await self.redis.aclose()
        await self.redis.connection_pool.disconnect()


async def connect(
    redis_url: str,
    *,
    wait_s: float = 30.0,
    outage_s: float = 300.0,
    full_s: float = 300.0,
    deadline_s: float | None = None,
) -> StoreConnection:
    """Opens a store connection; waits at most `wait_s` for the first answer of Redis.

    For `outage_s`, `full_s` and `deadline_s` see `AutoPipeline`.
    """
    connection = StoreConnection(redis_url, outage_s=outage_s, full_s=full_s, deadline_s=deadline_s)
    try:
        async with asyncio.timeout(wait_s):
            await _first_answer(connection)
    except StoreRefusedError:
        await connection.aclose()
        raise
    except TimeoutError as error:
        await connection.aclose()
        raise StoreUnavailableError(connection.url, wait_s, connection.pipeline.last_failure) from error
    return connection


async def _first_answer(connection: StoreConnection) -> None:
    while True:
        try:
            return await connection.ping()
        except StoreUnavailableError:  # its deadline is shorter than `wait_s`
            continue


def without_credentials(url: str) -> str:
    """Returns the URL without credentials, for logs."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
