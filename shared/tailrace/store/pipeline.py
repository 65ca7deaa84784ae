"""One connection whose commands share round trips: commands issued during a batch form the next batch.

Invariants: commands reach Redis in their order; a command whose answer was lost with the connection is
sent again, so all commands must be repeatable (the scripts are). The caller of a failed command gets a
typed error; an outage only delays commands, up to `outage_s`. A write that a full Redis refuses (no
memory, or no room on its disk) is put aside and repeated, up to `full_s`; other commands overtake it,
since they may free memory.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import hiredis
from prometheus_client import Counter, Gauge, Histogram
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import (
    AuthenticationError,
    ClusterDownError,
    InvalidResponse,
    NoPermissionError,
    NoScriptError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import (
    ConnectionError as RedisConnectionError,
)
from redis.exceptions import (
    TimeoutError as RedisTimeoutError,
)

from tailrace.log import get_logger
from tailrace.retry import Backoff
from tailrace.store.errors import StoreError, StoreFullError, StoreRefusedError, StoreUnavailableError
from tailrace.store.scripts import ALL, Script

log = get_logger(__name__)

Argument = str | bytes | int | float
# While Redis moves to another host, another server may answer at its address, or no host.
CONNECTION_LOST = (RedisConnectionError, RedisTimeoutError, InvalidResponse, OSError)
# Errors that pass: a script holds Redis up, replicas or its master are away, it is no master for now.
_PASSING_WORDS = ("BUSY ", "NOREPLICAS ")
_PASSING = (ReadOnlyError, TryAgainError, ClusterDownError)
_NO_ROOM = ("command not allowed when used memory", "MISCONF")  # redis-py cuts some prefixes off


LOG_FULL_EVERY = 10  # attempts; about as many seconds

_WAITING_COMMANDS = Gauge("tailrace_store_waiting_commands", "Commands not sent to Redis yet.")
_BATCH_COMMANDS = Histogram(
    "tailrace_store_batch_commands",
    "Commands that shared one round trip.",
    buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
)
_BATCH_SECONDS = Histogram(
    "tailrace_store_batch_seconds",
    "One round trip of a batch.",
    buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.2, 1.0, 5.0, 30.0),
)
_LOST_CONNECTIONS = Counter("tailrace_store_lost_connections", "Losses of the connection to Redis.")
_REFUSED_COMMANDS = Counter(
    "tailrace_store_refused_commands", "Commands that Redis refused, by error.", ["error"]
)


class _OpenAnswer(NamedTuple):
    answer: asyncio.Future[Any]
    due_s: float  # time of the event loop


class Deadlines:
    """Fails answers that are `deadline_s` old with the exception that `make_error` returns.

    One timer serves all answers: a timeout for each command costs as much as the command. All answers
    have the same deadline, so they expire in the order of their commands.
    """

    def __init__(self, deadline_s: float, make_error: Callable[[], Exception]) -> None:
        self._deadline_s = deadline_s
        self._make_error = make_error
        self._open: deque[_OpenAnswer] = deque()
        self._alarm: asyncio.TimerHandle | None = None

    def add(self, answer: asyncio.Future[Any]) -> None:
        """Starts the deadline of an answer."""
        while self._open and self._open[0].answer.done():
            self._open.popleft()
        loop = asyncio.get_running_loop()
        self._open.append(_OpenAnswer(answer, loop.time() + self._deadline_s))
        if self._alarm is None:
            self._alarm = loop.call_at(self._open[0].due_s, self._on_alarm)

    def close(self) -> None:
        """Stops the timer; open answers do not fail any more."""
        self._open.clear()
        if self._alarm is not None:
            self._alarm.cancel()

    def _on_alarm(self) -> None:
        loop = asyncio.get_running_loop()
        while self._open and (self._open[0].answer.done() or self._open[0].due_s <= loop.time()):
            answer = self._open.popleft().answer
            if not answer.done():
                answer.set_exception(self._make_error())
        self._alarm = loop.call_at(self._open[0].due_s, self._on_alarm) if self._open else None


@dataclass(slots=True, eq=False)
class _Command:
    packed: bytes
    script: Script | None
    answer: asyncio.Future[Any]
    refused_since_s: float | None = None  # when a full Redis refused it first
    is_aside: bool = False  # waits for room in Redis


class AutoPipeline:
    """Pipeline of the commands of one loop tick, or of the time of one batch.

    `max_commands` and `max_bytes` limit a batch, and `answer_s` the wait for its answers. Commands are
    repeated for `outage_s` while Redis is away, and for `full_s` while it has no room. With
    `deadline_s` a command fails after that time for any reason; Redis may still execute it.
    """

    def __init__(
        self,
        connection: AbstractConnection,
        url: str,
        *,
        max_commands: int = 1024,
        max_bytes: int = 16 << 20,
        answer_s: float = 30.0,
        outage_s: float = 300.0,
        full_s: float = 300.0,
        deadline_s: float | None = None,
    ) -> None:
        self._connection = connection
        self._url = url
        self._max_commands = max_commands
        self._max_bytes = max_bytes
        self._answer_s = answer_s
        self._outage_s = outage_s
        self._full_s = full_s
        self._deadlines: Deadlines | None = None
        if deadline_s is not None:
            self._deadlines = Deadlines(deadline_s, partial(self._late, deadline_s))
        self._waiting: deque[_Command] = deque()
        self._sender: asyncio.Task[None] | None = None
        self._batch: list[_Command] = []
        self._is_out_of_step = False
        self._aside: list[_Command] = []
        self._room_wait: asyncio.Task[None] | None = None
        self._room_backoff = Backoff(0.1, 1.0)
        self.last_failure = "no answer"
        self.num_batches = 0
        self.num_commands = 0

    async def command(self, *arguments: Argument) -> Any:
        """Returns the answer to one repeatable command."""
        return await self._issue(None, arguments)

    async def script(self, script: Script, prefix: str, *arguments: Argument) -> Any:
        """Returns the answer of a script that runs on the keys of `prefix`."""
        return await self._issue(script, (prefix, *arguments))

    async def close(self) -> None:
        """Cancels waiting commands and closes the connection."""
        if self._deadlines is not None:
            self._deadlines.close()
        for task in (self._room_wait, self._sender):
            if task is not None and not task.done():
                task.cancel()
                await asyncio.wait([task])
        for command in (*self._aside, *self._waiting):
            command.answer.cancel()
        self._aside.clear()
        self._waiting.clear()
        await self._connection.disconnect(nowait=True)

    def _issue(self, script: Script | None, arguments: tuple[Argument, ...]) -> asyncio.Future[Any]:
        call = () if script is None else ("EVALSHA", script.digest, 1)
        loop = asyncio.get_running_loop()
        command = _Command(_pack(*call, *arguments), script, loop.create_future())
        self._waiting.append(command)
        if self._deadlines is not None:
            self._deadlines.add(command.answer)
        self._wake()
        return command.answer

    def _late(self, deadline_s: float) -> StoreUnavailableError:
        return StoreUnavailableError(self._url, deadline_s, self.last_failure)

    def _wake(self) -> None:
        if self._sender is None or self._sender.done():
            loop = asyncio.get_running_loop()
            self._sender = loop.create_task(self._send_all(), name="store-pipeline")
            self._sender.add_done_callback(self._on_sender_end)

    def _on_sender_end(self, sender: asyncio.Task[None]) -> None:
        """Settles what the sender has left: cancelled with it, or failed with its unexpected error.

        A caller whose answer is cancelled ends as if it was told to, without a word in the log.
        """
        error = None if sender.cancelled() else sender.exception()
        left = [command.answer for command in self._batch if not command.is_aside]
        if error is None:
            for answer in left:
                answer.cancel()
            return
        for answer in left:
            _fail(answer, StoreError(f"{type(error).__name__}: {error}"))
        self._is_out_of_step = True
        if self._waiting:
            self._wake()

    async def _send_all(self) -> None:
        if self._is_out_of_step:  # answers of failed commands may still come
            await self._connection.disconnect(nowait=True)
            self._is_out_of_step = False
        while self._waiting:
            _WAITING_COMMANDS.set(len(self._waiting))
            self._batch = self._next_batch()
            try:
                await self._deliver(self._batch)
            except (StoreUnavailableError, StoreRefusedError) as error:
                for command in (*self._batch, *self._waiting):
                    _fail(command.answer, error)
                self._waiting.clear()

    def _next_batch(self) -> list[_Command]:
        batch: list[_Command] = []
        num_bytes = 0
        while self._waiting and len(batch) < self._max_commands and num_bytes < self._max_bytes:
            command = self._waiting.popleft()
            if not command.answer.done():
                batch.append(command)
                num_bytes += len(command.packed)
        return batch

    async def _deliver(self, batch: Sequence[_Command]) -> None:
        """Completes all commands of the batch, over any number of reconnections."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        backoff = Backoff(0.01, 0.5, jitter=0.5)
        while open_commands := [
            command for command in batch if not (command.is_aside or command.answer.done())
        ]:
            try:
                await self._exchange(open_commands)
            except AuthenticationError as error:
                raise StoreRefusedError(self._url, str(error)) from error
            except CONNECTION_LOST as error:
                self.last_failure = str(error) or type(error).__name__
                if not backoff.num_failures:
                    _LOST_CONNECTIONS.inc()
                    log.warning("redis is away", url=self._url, error=self.last_failure)
                await self._connection.disconnect(nowait=True)
                waited_s = loop.time() - began
                if waited_s > self._outage_s:
                    raise StoreUnavailableError(self._url, waited_s, self.last_failure) from error
                await backoff.sleep()
        if backoff.num_failures:
            log.info("redis is back", url=self._url, waited_s=round(loop.time() - began, 2))

    async def _exchange(self, batch: Sequence[_Command]) -> None:
        """Makes one round trip; commands with an unknown script stay open until Redis has loaded it."""
        self.num_batches += 1
        self.num_commands += len(batch)
        _BATCH_COMMANDS.observe(len(batch))
        with _BATCH_SECONDS.time():
            await self._send_and_read(batch)

    async def _send_and_read(self, batch: Sequence[_Command]) -> None:
        async with asyncio.timeout(self._answer_s):
            await self._connection.send_packed_command(
                [command.packed for command in batch], check_health=False
            )
            misses_scripts = False
            for command in batch:
                answer = await self._read()
                if isinstance(answer, NoScriptError) and command.script is not None:
                    misses_scripts = True
                elif isinstance(answer, RedisError):
                    self._refuse(command, str(answer))
                else:
                    self._answer(command, answer)
            if misses_scripts:
                await self._load_scripts()

    async def _load_scripts(self) -> None:
        """Loads all scripts, also for users who may not; these wait until someone has."""
        packed = [_pack("SCRIPT", "LOAD", script.source) for script in ALL]
        await self._connection.send_packed_command(packed, check_health=False)
        answers = [await self._read() for _ in packed]
        if isinstance(answers[0], NoPermissionError):
            raise RedisConnectionError("waiting for the scheduler to load the scripts")

    async def _read(self) -> Any:
        """Reads one answer; returns error answers, raises a lost connection and errors that pass."""
        try:
            return await self._connection.read_response(
                disable_decoding=True, timeout=math.inf, disconnect_on_error=False
            )
        except ResponseError as error:
            if passes(error):
                raise RedisConnectionError(str(error)) from error
            return error

    # A full Redis

    def _answer(self, command: _Command, answer: object) -> None:
        if not command.answer.done():
            command.answer.set_result(answer)
        if command.refused_since_s is not None and self._room_backoff.num_failures:
            self._room_backoff.reset()
            waited_s = asyncio.get_running_loop().time() - command.refused_since_s
            log.info("redis has room again", url=self._url, waited_s=round(waited_s, 2))

    def _refuse(self, command: _Command, reason: str) -> None:
        if not any(word in reason for word in _NO_ROOM):
            _REFUSED_COMMANDS.labels(StoreError.__name__).inc()
            _fail(command.answer, StoreError(reason))
            return
        _REFUSED_COMMANDS.labels(StoreFullError.__name__).inc()
        now_s = asyncio.get_running_loop().time()
        command.refused_since_s = command.refused_since_s or now_s
        if now_s - command.refused_since_s >= self._full_s:
            _fail(command.answer, StoreFullError(reason))
            return
        command.is_aside = True
        self._aside.append(command)
        if self._room_wait is None or self._room_wait.done():
            waiting = self._wait_for_room(StoreFullError(reason))
            self._room_wait = asyncio.create_task(waiting, name="store-room")

    async def _wait_for_room(self, error: StoreFullError) -> None:
        """Repeats the refused commands after a delay, before other waiting commands."""
        if self._room_backoff.num_failures % LOG_FULL_EVERY == 0:
            log.error("redis is full: writes wait", url=self._url, reason=str(error))
        await self._room_backoff.sleep()
        aside, self._aside = self._aside, []
        for command in aside:
            command.is_aside = False
        self._waiting.extendleft(reversed(aside))
        self._wake()


def passes(error: ResponseError) -> bool:
    """Tells whether Redis refuses a command only for now, as while it moves to another host."""
    return isinstance(error, _PASSING) or str(error).startswith(_PASSING_WORDS)


def _pack(*arguments: Argument) -> bytes:
    packed: bytes = hiredis.pack_command(arguments)  # type: ignore[arg-type]  # its stub says 1-tuple
    return packed


def _fail(answer: asyncio.Future[Any], error: StoreError) -> None:
    if not answer.done():
        answer.set_exception(error)
