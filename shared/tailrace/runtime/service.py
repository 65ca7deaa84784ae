"""`Service`: one process, its actors, and their life cycle from start to drain.

Start: metrics port, NATS, start hooks, actors, loops, ready. Drain, on SIGTERM, SIGINT or `stop`: not
ready, stop hooks, no new messages, messages in flight finish or are handed back, loops and tasks are
cancelled, drain hooks run in reverse order, NATS closes. The wait for stop hooks and messages in
flight, and each drain hook, ends after `drain_s`; a second signal ends the wait at once.
"""

import asyncio
import gc
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import nats.micro
from nats.micro.service import EndpointStats as MicroStats
from nats.micro.service import Service as MicroService

from tailrace import metrics
from tailrace.bus import Bus, flush
from tailrace.bus.streams import ACK_WAIT_S
from tailrace.config import Endpoints, RunConfig
from tailrace.log import get_logger
from tailrace.runtime.endpoint import EndpointActor, EndpointSpec
from tailrace.runtime.guard import EXIT_FAILED, Failure, Guard, Tasks, finish
from tailrace.runtime.health import HealthServer, announced, watch_loop_delay
from tailrace.runtime.pull import PullActor, PullSpec
from tailrace.runtime.settlement import Delivery
from tailrace.runtime.subscription import SubscriptionActor
from tailrace_protos import subjects
from tailrace_protos.base import Message

log = get_logger(__name__)

VERSION = "0.1.0"  # of the wire contract; NATS micro requires one per service
CLOSE_TIMEOUT_S = 5.0
MAX_BLOCKED_S = 15.0  # four times this ends the process, as the kubelet's liveness probe does
READY_FILE = "TAILRACE_READY_FILE"
SIGNALS = (signal.SIGTERM, signal.SIGINT)

M = TypeVar("M")
Q = TypeVar("Q", bound=Message)
T = TypeVar("T")
Hook = Callable[[], Awaitable[None]]
Actor = EndpointActor[Any] | SubscriptionActor[Any] | PullActor[Any]

# Objects allocated per message form no cycles. Rare collections save up to a fifth of the CPU time of a
# busy process, and avoid the pauses of full collections (30 ms and more).
_GC_THRESHOLDS = (50_000, 20, 100)


class Service:
    """Service with its handlers, loops and hooks; a declaration while it serves starts at once."""

    def __init__(
        self,
        name: str,
        run: RunConfig,
        endpoints: Endpoints,
        *,
        instance_id: str = "",
        drain_s: float = 20.0,
        max_blocked_s: float = MAX_BLOCKED_S,
    ) -> None:
        self.name = name
        self.run = run
        self.endpoints = endpoints
        self.instance_id = instance_id
        self.max_blocked_s = max_blocked_s  # of the event loop, for `LoopWatchdog`
        self.draining = asyncio.Event()
        self.bus = Bus(
            endpoints, name=f"{name}/{instance_id}" if instance_id else name, run=run.exp_name
        )
        self.bus.connection.on_closed = lambda reason: self.stop(f"nats: {reason}", EXIT_FAILED)
        self.health = HealthServer(self._why_not_ready)
        self._guard = Guard(self.stop)
        self._tasks = Tasks(self._guard)
        self._drain_s = drain_s
        self._hurry = asyncio.Event()
        self._actors: list[Actor] = []
        self._loops: list[tuple[str, Hook]] = []
        self._start_hooks: list[Hook] = []
        self._stop_hooks: list[Hook] = []
        self._drain_hooks: list[Hook] = []
        self._micro: MicroService | None = None
        self._serving = False
        self._closing = ExitStack()
        self._ready: bool | None = None  # None: ready at the end of the start
        self._exit_code = 0
        self.stop_reason = ""  # reason of a non-zero exit code

    # Declarations

    def endpoint(
        self,
        subject: str,
        request_type: type[Q],
        handler: Callable[[Q], Awaitable[Message]],
        *,
        queue: str = "",
        mailbox: int = 1024,
        concurrency: int = 64,
    ) -> None:
        """Answers requests. Instances with the same `queue` (default: one for all) share them.

        A handler may raise `CallFailedError` to answer with a typed error.
        """
        spec = EndpointSpec(subject, request_type, handler, queue, mailbox, concurrency)
        self._declare(EndpointActor(spec, self.bus, self._guard))

    def subscribe(
        self,
        subject: str,
        message_type: type[M],
        handler: Callable[[M], Awaitable[None]],
        *,
        mailbox: int = 1024,
    ) -> None:
        """Handles published messages in order, one at a time."""
        self._declare(SubscriptionActor(subject, message_type, handler, mailbox, self.bus, self._guard))

    def pull(
        self,
        stream: str,
        durable: str,
        message_type: type[M],
        handler: Callable[[M, Delivery], Awaitable[None]],
        *,
        max_in_flight: int,
        ack_wait_s: float = ACK_WAIT_S,
        max_deliveries: int = 5,
        dead_subject: str = "",
    ) -> None:
        """Handles the messages of a durable consumer; waits until it is provisioned.

        A return of the handler acknowledges the message, `HandBack` returns it to the queue,
        `LeftToAnother` leaves it to the worker that has it now, and any other exception leads to a
        later redelivery. After `max_deliveries`, or when malformed, the
        message goes to `dead_subject` (default: the run's dead episodes). `ack_wait_s` is the
        consumer's.
        """
        dead = dead_subject or subjects.dead_episodes(self.run.exp_name)
        spec = PullSpec(
            stream, durable, message_type, handler, max_in_flight, ack_wait_s, max_deliveries, dead
        )
        self._declare(PullActor(spec, self.bus, self._guard))

    def loop(self, name: str, body: Hook) -> None:
        """Runs `body` until it returns; restarts it with back-off after each failure."""
        self._loops.append((name, body))
        if self._serving:
            self._tasks.loop(name, body)

    def on_start(self, hook: Hook) -> None:
        """Adds a hook to await after NATS is connected and before the first message, in order."""
        self._start_hooks.append(hook)

    def on_stop(self, hook: Hook) -> None:
        """Adds a hook to await first in a drain, while loops still run; `drain_s` is its limit too."""
        self._stop_hooks.append(hook)

    def on_drain(self, hook: Hook) -> None:
        """Adds a hook to await after actors and tasks, before NATS closes, in reverse order."""
        self._drain_hooks.append(hook)

    def spawn(self, coroutine: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T | Failure]:
        """Runs a task until the service ends at the latest; an exception becomes its `Failure`."""
        return self._tasks.spawn(coroutine, name)

    def set_ready(self, ready: bool) -> None:
        """Sets the answer of `/readyz`. Without a call the service is ready once started.

        The first time, a ready service touches the file that `TAILRACE_READY_FILE` names, if it is set.
        """
        self._ready = ready
        metrics.READY.set(ready)
        if ready and READY_FILE in os.environ:
            path = Path(os.environ[READY_FILE])
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()

    def stop(self, reason: str, exit_code: int = 0) -> None:
        """Drains and ends the service; the first non-zero exit code counts."""
        if exit_code and not self._exit_code:
            self._exit_code, self.stop_reason = exit_code, reason
        if not self.draining.is_set():
            log.info("stopping", reason=reason, exit_code=exit_code)
            self.draining.set()

    # Life

    async def serve(self) -> int:
        """Runs until it is stopped; returns the exit code of the process."""
        self._handle_signals()
        try:
            await self._or_stopped(self._guard.run("start", self._start()))
            await self.draining.wait()
            await self._drain()
        finally:
            await self._close()
        log.info("stopped", exit_code=self._exit_code)
        return self._exit_code

    async def _or_stopped(self, starting: Coroutine[Any, Any, Failure | None]) -> None:
        """Waits for the end of the start; cancels it when the service is stopped before."""
        start = asyncio.create_task(starting, name="start")
        stopped = asyncio.create_task(self.draining.wait())
        await asyncio.wait({start, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not start.done():
            start.cancel()
            await asyncio.wait({start})
        elif isinstance(start.result(), Failure):
            self.stop("start failed", EXIT_FAILED)

    async def _start(self) -> None:
        await self.health.start()
        log.info("metrics port", port=self.health.port)
        self._closing.enter_context(
            announced(self.health.port, self.run.exp_name, self.name, self.instance_id)
        )
        await self.bus.start()
        self._micro = await nats.micro.add_service(
            self.bus.connection.client,
            name=self.name,
            version=VERSION,
            description=f"Tailrace {self.name}",
            metadata={
                "run": self.run.exp_name,
                "instance_id": self.instance_id,
                "host": self.endpoints.host_id,
            },
            stats_handler=self._micro_stats,
        )
        for hook in self._start_hooks:
            await hook()
        loops = tuple(self._loops)
        self._serving = True
        for actor in tuple(self._actors):  # a later declaration starts itself
            await self._start_actor(actor)
        await flush(self.bus.connection.client)  # a ready service is reachable at every endpoint
        self._tasks.loop("event loop delay", watch_loop_delay)
        for name, body in loops:
            self._tasks.loop(name, body)
        if self._ready is None:
            self.set_ready(True)
        tame_garbage_collection()
        log.info("started", num_actors=len(self._actors), num_loops=len(self._loops))

    async def _drain(self) -> None:
        self.set_ready(False)
        asyncio.get_running_loop().call_later(self._drain_s, self._hurry.set)
        hooks = [self._guard.run("stop hook", hook()) for hook in self._stop_hooks]
        await finish(map(asyncio.create_task, hooks), self._hurry)
        if self._serving:
            await self._drain_actors()
        await self._tasks.end()
        for hook in reversed(self._drain_hooks):
            await self._guard.run("drain hook", asyncio.wait_for(hook(), self._drain_s))

    async def _drain_actors(self) -> None:
        for endpoint in self._micro._endpoints if self._micro is not None else ():
            # `Service.stop` would drop requests that have already arrived.
            if endpoint._subscription is not None:
                draining = self.bus.connection.drain(endpoint._subscription)
                await self._guard.run("drain endpoint", draining)
        drains = (self._guard.run(actor.where, actor.drain(self._hurry)) for actor in self._actors)
        await asyncio.gather(*drains)

    async def _close(self) -> None:
        await self._guard.run("close", asyncio.wait_for(self.bus.close(), CLOSE_TIMEOUT_S))
        await self.health.stop()
        self._closing.close()
        for number in SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)

    # Parts

    def _declare(self, actor: Actor) -> None:
        self._actors.append(actor)
        if self._serving:
            self.spawn(self._start_actor(actor), f"start {actor.where}")

    async def _start_actor(self, actor: Actor) -> None:
        if isinstance(actor, EndpointActor):
            assert self._micro is not None
            await actor.start(self._micro)
        else:
            await actor.start()

    def _micro_stats(self, of: MicroStats) -> dict[str, float]:
        for actor in self._actors:
            if isinstance(actor, EndpointActor) and actor.spec.subject == of.subject:
                return vars(actor.stats)
        return {}

    def _why_not_ready(self) -> str:
        if self.draining.is_set():
            return "draining"
        if not self._ready:
            return "starting"
        return "" if self.bus.connection.is_connected else "nats is away"

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, signal.Signals(number).name)

    def _on_signal(self, name: str) -> None:
        if self.draining.is_set():
            self._hurry.set()
        self.stop(name)


def tame_garbage_collection() -> None:
    """Excludes existing objects from garbage collection, and collects new ones rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
