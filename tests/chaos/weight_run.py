"""A run whose weights are on their way, and callers that check each token.

weight_sync and servers are real processes. Each version is a model with random weights of its own, so
that a token's log-probability shows which version sampled it.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tailrace.bus import Bus
from tailrace.channel import Address, ChannelError, Generation, ZmqGenerateClient
from tailrace.config import Endpoints
from tailrace.store import Blobs, Outbox, StoreConnection
from tailrace.weights import TensorBytes, WeightPublisher, WeightReceiver
from tailrace_protos import subjects
from tailrace_protos.base import pack_int32
from tailrace_protos.control import ServerState, ServerStatus
from tailrace_protos.event import ServerWeightsApplied, WeightsPublished
from tailrace_protos.generation import GenerateRequest
from tailrace_protos.weights import ModelCard, RouteRequest, WeightsAvailable
from tests.integration.inference import world as small
from tests.integration.inference.world import address_of, own_logprobs, weights_of
from tests.provenance import versions_of
from tests.world.link import Fault, Links
from tests.world.processes import ServiceProcess, environment

MODEL = small.MODEL | {"hidden_size": 256, "vocab_size": 4000}  # 5 MB: several chunks
DEADLINE_S = 180.0
PROMPT = [5, 6, 7]
NUM_NEW = 24
NUM_CALLERS = 2
BIND_HOST, LINK_HOST = "127.0.0.2", "127.0.0.3"  # an address, and one for a link in front of it
WHOLE: dict[str, Any] = {"max_delta_share": 0.0}  # settings of weight_sync: no differences
LINKED: dict[str, Any] = {
    "weight_sync": WHOLE | {"advertise_host": LINK_HOST},
    "inference": {"advertise_host": LINK_HOST},
}


def make_model(seed: int) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small, "MODEL", MODEL)
        return small.make_model(seed)


class WeightRun:
    """Processes of a run, a learner that publishes, and callers that never stop to ask."""

    def __init__(
        self,
        bus: Bus,
        endpoints: Endpoints,
        folder: Path,
        *,
        hosts: Sequence[str],
        weight_sync: Mapping[str, Any] | None = None,
        inference: Mapping[str, Any] | None = None,
        variables: Mapping[str, str] | None = None,
        calls_may_fail: bool = False,
    ) -> None:
        """`hosts`: those of the servers; weight_sync runs on `sync-host`.

        With `calls_may_fail`, a call at a server that is dead or stopped is given up.
        """
        self.bus, self.folder = bus, folder
        self.publisher = WeightPublisher(bus, bus.run, "learner-host")
        config = folder / "experiment.yaml"
        sections = {
            "weight_sync": {"announce_interval_s": 0.2, "bind_host": BIND_HOST, **(weight_sync or {})},
            "inference": {
                "bind_host": BIND_HOST,
                "drain_s": 1.0,
                "max_running": 16,
                "heartbeat_s": 0.2,
                **(inference or {}),
            },
        }
        config.write_text(json.dumps({"exp_name": bus.run, "output_dir": str(folder)} | sections))
        common = environment(endpoints, folder) | dict(variables or {})
        self.weight_sync = ServiceProcess(
            "weight_sync", config, common | {"TAILRACE_HOST_ID": "sync-host"}, folder / "sync.log"
        )
        self.servers = [
            ServiceProcess(
                "inference",
                config,
                common | {"TAILRACE_HOST_ID": host},
                folder / f"{at}.log",
                ("--server-id", f"s{at}"),
            )
            for at, host in enumerate(hosts)
        ]
        self.step = 0
        self.newest = -1  # that fits the servers
        self.models: dict[int, Any] = {}  # by policy version; those that fit the servers
        self.root_port = 0  # of weight_sync, once there is a link in front of it
        self.num_tokens = 0  # sampled and checked
        self._may_fail = (ChannelError, TimeoutError) if calls_may_fail else ()
        self._call_s = 2.0 if calls_may_fail else DEADLINE_S
        self._callers: list[asyncio.Task[None]] = []

    @property
    def processes(self) -> list[ServiceProcess]:
        return [self.weight_sync, *self.servers]

    @asynccontextmanager
    async def running(self, redis: StoreConnection) -> AsyncIterator[None]:
        """The processes run within this block, in which all servers serve the first version."""
        try:
            for process in self.processes:
                process.start()
            await self.bus.provision_run(self.bus.run)
            await Blobs(redis, self.bus.run).put_model_card(ModelCard(json.dumps(MODEL).encode(), {}))
            await self.publish()
            await self.all_on_newest()
            yield
        finally:
            await self._close()

    async def _close(self) -> None:
        for process in self.processes:
            if process.process is not None:
                process.running.send_signal(signal.SIGCONT)
            process.kill()
        await self.publisher.close()
        for path in Path("/dev/shm").glob(f"tailrace.{self.bus.run}.*"):
            path.unlink()

    async def publish(self) -> int:
        """Publishes a whole new version."""
        model = make_model(self.step + 1)
        self.newest = await self.offer(weights_of(model))
        self.models[self.newest] = model
        return self.newest

    async def offer(self, tensors: list[TensorBytes]) -> int:
        """Publishes any tensors; returns their version, which no server needs to take."""
        self.step += 1
        return await self.publisher.publish(tensors, lineage="a", optimizer_step=self.step)

    async def available(self) -> WeightsAvailable:
        """The newest version as weight_sync announces it."""
        found = await WeightReceiver(self.bus, self.bus.run, "test-host", "test").current()
        assert found is not None
        return found

    async def struck(self, fault: Fault) -> None:
        """Waits until a link is disturbed."""
        async with asyncio.timeout(DEADLINE_S):
            await fault.struck.wait()

    async def ready(self) -> list[ServerStatus]:
        found = await self.bus.registry.all()
        return [status for status in found if status.state is ServerState.READY]

    async def versions(self) -> list[int]:
        """Versions that the ready servers serve."""
        return [status.policy_version for status in await self.ready()]

    async def all_on_newest(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while await self.versions() != [self.newest] * len(self.servers):
                self._check_callers()
                await asyncio.sleep(0.02)

    async def still_generates(self) -> None:
        """Waits for the tokens of calls that begin now."""
        before = self.num_tokens
        async with asyncio.timeout(DEADLINE_S):
            while self.num_tokens < before + 2 * NUM_CALLERS * NUM_NEW:
                self._check_callers()
                await asyncio.sleep(0.02)

    async def logged(self, process: ServiceProcess, line: str, num_before: int = 0) -> None:
        """Waits until a process has logged these words more than `num_before` times."""
        async with asyncio.timeout(DEADLINE_S):
            while process.log.count(line) <= num_before:
                self._check_callers()
                await asyncio.sleep(0.02)

    @asynccontextmanager
    async def called(self) -> AsyncIterator[None]:
        """Callers ask within this block; each of their tokens is checked."""
        client = ZmqGenerateClient()
        await client.start()
        self._callers = [
            asyncio.create_task(self._call(client, number)) for number in range(NUM_CALLERS)
        ]
        try:
            yield
            await self.still_generates()
        finally:
            await _end(self._callers)
            await client.close()

    def _check_callers(self) -> None:
        for caller in self._callers:
            if caller.done():
                caller.result()

    async def _call(self, client: ZmqGenerateClient, number: int) -> None:
        choose, num_calls = random.Random(number), 0
        while True:
            ready = await self.ready()
            if not ready:
                await asyncio.sleep(0.05)
                continue
            num_calls += 1
            call_id = f"c{number}.{num_calls}"
            request = GenerateRequest(call_id, f"{call_id}.episode", pack_int32(PROMPT), NUM_NEW)
            try:
                async with asyncio.timeout(self._call_s):
                    made = await client.generate(_direct(choose.choice(ready)), request).collect()
            except self._may_fail:
                continue
            await self._check(made)

    async def _check(self, made: Generation) -> None:
        """Each token has the log-probability of the version that its span names; versions only rise."""
        versions = versions_of(made.spans)
        assert len(versions) == made.num_tokens == NUM_NEW
        assert versions == sorted(versions)
        ids, logprobs = [*PROMPT, *made.token_ids.tolist()], made.inference_logprobs
        for version in set(versions):
            model = await self._model(version)
            expected = torch.tensor(own_logprobs(model, ids, NUM_NEW))
            is_its = torch.tensor([other == version for other in versions])
            given = torch.from_numpy(logprobs.copy())
            assert torch.allclose(given[is_its], expected[is_its], atol=1e-3), (version, versions)
        self.num_tokens += made.num_tokens

    async def _model(self, version: int) -> Any:
        """The model of a version; servers may take it before its number comes back to the learner."""
        async with asyncio.timeout(DEADLINE_S):
            while version not in self.models:
                await asyncio.sleep(0.01)
        return self.models[version]


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel until all have ended.

    Before Python 3.12 `wait_for`, which the client of NATS uses, forgets a cancellation that comes
    together with the result.
    """
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=0.2)


@asynccontextmanager
async def linked(run: WeightRun) -> AsyncIterator[Links]:
    """Links in front of weight_sync and of each server that passes weights on."""
    links = Links(LINK_HOST, BIND_HOST)

    async def on_announced(available: WeightsAvailable) -> None:
        run.root_port = await links.open(available.source.zmq_endpoint)

    async def on_route(request: RouteRequest) -> None:
        await links.open(request.relay.zmq_endpoint)

    name = run.bus.run
    await run.bus.subscribe(subjects.weights_published(name), WeightsAvailable, on_announced)
    await run.bus.subscribe(subjects.weight_route(name), RouteRequest, on_route)
    try:
        yield links
    finally:
        await links.close()


def _direct(status: ServerStatus) -> Address:
    """Address without a link in front of it."""
    address = address_of(status)
    return address._replace(zmq_endpoint=address.zmq_endpoint.replace(LINK_HOST, BIND_HOST))


async def audited(run: WeightRun, outbox: Outbox) -> None:
    """Checks the events of the run: each version once, and no server took one that does not fit."""
    async with asyncio.timeout(DEADLINE_S):  # servers report beside their work
        while run.newest not in (applied := await _versions_in(outbox, ServerWeightsApplied)):
            await asyncio.sleep(0.05)
    published = await _versions_in(outbox, WeightsPublished)
    assert len(published) == len(set(published)) == run.step
    assert run.models.keys() <= set(published)
    assert set(applied) <= run.models.keys(), "a wrong update was applied"


async def _versions_in(
    outbox: Outbox, kind: type[ServerWeightsApplied] | type[WeightsPublished]
) -> list[int]:
    events = await outbox.read(100_000, 0)
    return [event.body.policy_version for event in events if isinstance(event.body, kind)]
