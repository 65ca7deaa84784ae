"""A service under test: served inside the test's own event loop, stopped at the end of the block."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import nats.errors

from tailrace.config import Endpoints, RunConfig, load_experiment, run_config
from tailrace.runtime import Args, Service
from tailrace_protos import subjects
from tailrace_protos.control import LeaseReply, LeaseRequest
from tailrace_protos.episode import EnvTask, EpisodeTask, Lease


def endpoints_of(url: str, user: str = "", password: str = "") -> Endpoints:
    return Endpoints(
        nats_url=url, nats_user=user, nats_password=password, redis_url="redis://unused", host_id="test"
    )


def load_args(config: Path, instance_id: str, endpoints: Endpoints) -> Args:
    """Arguments of a service, as its command line gives them."""
    experiment = load_experiment(str(config))
    return Args(str(config), instance_id, experiment, run_config(experiment, str(config)), endpoints)


def make_service(url: str, run: str, name: str = "worker", drain_s: float = 5.0) -> Service:
    return Service(name, RunConfig(exp_name=run), endpoints_of(url), instance_id="w0", drain_s=drain_s)


@asynccontextmanager
async def serving(service: Service) -> AsyncIterator[asyncio.Task[int]]:
    """Serve in the background once started; the task's result is the exit code."""
    task = asyncio.create_task(service.serve())
    try:
        await eventually(lambda: service._ready is not None)
        yield task
    finally:
        service.stop("end of test")
        await asyncio.wait({task})


async def eventually(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Return once `condition` holds; fail when it does not in time."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


async def eventually_async(condition: Callable[[], Awaitable[bool]], timeout_s: float = 60.0) -> None:
    """The same for a question to a server, which is asked again where its answer is late."""
    async with asyncio.timeout(timeout_s):
        while True:
            with contextlib.suppress(nats.errors.TimeoutError):
                if await condition():
                    return
            await asyncio.sleep(0.02)


def episode(number: int, attempt: int = 0) -> EpisodeTask:
    return EpisodeTask(
        f"g{number}.0", f"g{number}", 0, attempt, "train", EnvTask("frozen_lake", number), 0.0
    )


def outgoing(run: str, numbers: range) -> list[tuple[str, object, str]]:
    """Episode messages, ready for `publish_durable_many`."""
    tasks = [episode(number) for number in numbers]
    return [(subjects.episodes(run, "train"), task, f"{run}.{task.message_id}") for task in tasks]


def lease_request(worker_id: str = "w") -> LeaseRequest:
    return LeaseRequest(worker_id, ("e",), (1,))


def lease_reply(server_id: str = "s") -> LeaseReply:
    return LeaseReply((Lease("e", server_id, "subject", ""),))
