"""Inference server process: waits for the model card and the weights, then serves."""

import asyncio
import os
import sys
import time
import uuid
from contextlib import nullcontext, suppress
from pathlib import Path

from prometheus_client import REGISTRY

from tailrace.bus import BusError
from tailrace.config import ConfigError
from tailrace.device_turn import DeviceTurn
from tailrace.log import get_logger
from tailrace.runtime import Args, Failure, Service, run_service
from tailrace.store import Blobs, connect
from tailrace.weights import WeightReceiver
from tailrace_inference.adapters.emission_log import EmissionLog
from tailrace_inference.adapters.engines import make_follower, start_engine
from tailrace_inference.adapters.listeners import Listeners
from tailrace_inference.adapters.node_link import Node
from tailrace_inference.adapters.sleeper import Sleeper
from tailrace_inference.adapters.weight_follower import WeightFollower
from tailrace_inference.config import InferenceConfig
from tailrace_inference.core.reprefill import kept_contexts
from tailrace_inference.handlers import ABORT_S, ControlHandler, InferenceHandler
from tailrace_inference.metrics import EngineCollector
from tailrace_inference.ports import EngineFailedError, EngineFollower, EngineRefusalError
from tailrace_protos import subjects
from tailrace_protos.control import DrainRequest, ProbeRequest, ServerStatus
from tailrace_protos.weights import ModelCard, WeightsAvailable

log = get_logger(__name__)

_TELL_S = 2.0  # for the registry to hear that this server leaves
_HOOK_MARGIN_S = ABORT_S + 5.0  # beyond `drain_s`, to send last chunks and close sockets


class _Process:
    """Parts of a running inference server, and the order in which they start and stop."""

    def __init__(self, args: Args) -> None:
        self.config = config = args.section("inference", InferenceConfig)
        self.service = service = Service(
            "inference",
            args.run,
            args.endpoints,
            instance_id=args.server_id,
            drain_s=config.drain_s + _HOOK_MARGIN_S,
        )
        self.run = args.run.exp_name
        self.server_id = args.server_id
        self.incarnation = uuid.uuid4().hex[:8]
        state_dir = os.environ.get("TAILRACE_STATE_DIR", "") or args.run.run_dir / "state"
        self.state_dir = Path(state_dir)
        self.emission_path = args.run.run_dir / f"emissions-{self.server_id}.bin"
        self.is_colocated = args.run.colocated
        self.turns = args.run.run_dir / "state"
        self.beat = asyncio.Event()
        self.failed = False
        service.set_ready(False)
        service.on_start(self.start)

    async def start(self) -> None:
        """Builds the engine, listens, and follows the weights."""
        service, run = self.service, self.run
        card = await _wait_for_card(service, run)
        turn = await self._first_turn() if self.is_colocated else None
        self.engine = await start_engine(card, self.config, sleeps=turn is not None)
        sleeper = None if turn is None else Sleeper(self.engine, turn)
        emissions = EmissionLog(self.emission_path) if self.config.emission_log else None
        contexts = kept_contexts(self.config, self.engine.features)
        self.handler = InferenceHandler(self.engine, service.draining.is_set, emissions, contexts)
        self.collector = EngineCollector(self.engine.stats)
        REGISTRY.register(self.collector)
        subject = subjects.generate(run, self.server_id)
        self.listeners = Listeners(
            self.config, service.bus.connection.client, subject, self.server_id, self.state_dir
        )
        await self.listeners.start(self.handler)
        receiver = WeightReceiver(
            service.bus,
            run,
            service.endpoints.host_id,
            self.server_id,
            target="" if self.config.weights_dtype == "published" else self.config.weights_dtype,
            bind_host=self.config.bind_host,
            advertise_host=self.config.advertise_host,
        )
        follower = WeightFollower(
            self.engine,
            receiver,
            self.server_id,
            self.on_applied,
            nullcontext if sleeper is None else sleeper.awake,
        )
        service.subscribe(subjects.weights_published(run), WeightsAvailable, follower.on_published)
        control = ControlHandler(service.stop, self.status, self.handler)
        service.endpoint(
            subjects.inference_control(run, self.server_id), DrainRequest, control.drain, mailbox=8
        )
        service.endpoint(
            subjects.inference_probe(run, self.server_id), ProbeRequest, control.probe, mailbox=8
        )
        service.loop("weights", follower.follow)
        service.loop("heartbeat", self.heartbeat)
        if sleeper is not None:
            service.loop("turns", sleeper.run)
        service.on_drain(receiver.close)
        service.on_drain(self.leave)
        service.spawn(self.watch(), "engine")

    async def watch(self) -> None:
        """Watches the engine. If it fails, callers get an error and this process ends."""
        result = await self.service.spawn(self.engine.watch(), "engine watch")
        if isinstance(result, Failure):
            self.failed = True
            self.service.stop("the engine failed", 1)
            self.handler.fail_all(f"the engine failed: {result.error_type}: {result.reason}")

    async def on_applied(self, policy_version: int) -> None:
        """Reports a version at once; the first one makes the server ready."""
        if not self.handler.has_weights:
            self.handler.has_weights = True
            self.service.set_ready(True)
            log.info("ready", policy_version=policy_version)
        self.beat.set()

    async def heartbeat(self) -> None:
        """Renews the registry entry, at once after a change."""
        while True:
            await self.service.bus.registry.put(self.status())
            try:
                async with asyncio.timeout(self.config.heartbeat_s):
                    await self.beat.wait()
            except TimeoutError:
                continue
            self.beat.clear()

    def status(self) -> ServerStatus:
        """Current status of the server."""
        stats, listeners, handler = self.engine.stats(), self.listeners, self.handler
        return ServerStatus(
            server_id=self.server_id,
            state=handler.state,
            nats_subject=listeners.nats_subject,
            zmq_endpoint=listeners.zmq_endpoint,
            zmq_public_key=listeners.zmq_public_key,
            host_id=self.service.endpoints.host_id,
            policy_version=stats.policy_version,
            capacity_tokens=stats.capacity_tokens,
            max_sequence_tokens=stats.max_sequence_tokens,
            max_running=self.config.max_running,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_failed=handler.num_failed,
            idle_s=handler.idle_s,
            busy_s=handler.busy_s,
            heartbeat_unix_s=time.time(),
            incarnation=self.incarnation,
            used_tokens=stats.used_tokens,
            cached_tokens=stats.cached_tokens,
            host_capacity_tokens=stats.host_capacity_tokens,
            num_steps=stats.num_steps,
            step_s=stats.step_s,
            num_read_tokens=stats.num_read_tokens,
            num_generated_tokens=stats.num_generated_tokens,
            num_computed_tokens=stats.num_computed_tokens,
            num_preemptions=stats.num_preemptions,
            num_recomputed_tokens=stats.num_preempted_tokens + handler.num_recomputed_tokens,
            releases_prefixes=self.engine.features.releases_prefixes,
        )

    async def leave(self) -> None:
        """Finishes calls within `drain_s`, aborts the rest and closes; new calls are refused."""
        with suppress(TimeoutError, BusError):  # nats-server may be away; calls go on over ZMQ
            async with asyncio.timeout(_TELL_S):
                await self.service.bus.registry.put(self.status())
        if not self.failed:
            await self.handler.finish(self.config.drain_s)
        await self.listeners.stop()
        await self.engine.close()
        self.handler.close()
        REGISTRY.unregister(self.collector)

    async def _first_turn(self) -> DeviceTurn:
        """Waits until the learner has prepared the model."""
        turn = DeviceTurn(self.turns, self.service.endpoints.host_id, "server")
        self.service.on_drain(turn.aclose)
        await turn.take()
        return turn


class _FollowerProcess:
    """A node of a server that only computes. It is no server: nobody but its leader knows it."""

    def __init__(self, args: Args, config: InferenceConfig, node: Node) -> None:
        self.config, self.node, self.run = config, node, args.run.exp_name
        self.service = service = Service(
            "inference",
            args.run,
            args.endpoints,
            instance_id=args.instance_id,
            drain_s=config.drain_s + _HOOK_MARGIN_S,
        )
        self.ended = asyncio.Event()
        self.has_started = False
        service.set_ready(False)
        service.on_start(self.start)
        service.on_stop(self.outlive_leader)

    async def start(self) -> None:
        """Computes for the leader, once it is there."""
        card = await _wait_for_card(self.service, self.run)
        follower = make_follower(card, self.config, self.node)
        self.service.on_drain(follower.close)
        await follower.start()
        self.has_started = True
        self.service.set_ready(True)
        self.service.spawn(self.watch(follower), "leader")

    async def watch(self, follower: EngineFollower) -> None:
        """Ends this process with the leader."""
        try:
            await follower.watch()
        except EngineFailedError as error:
            self.ended.set()
            self.service.stop(str(error), 0 if self.service.draining.is_set() else 1)

    async def outlive_leader(self) -> None:
        """Computes for the calls that the leader finishes, when the whole group is stopped."""
        if self.has_started:
            await self.ended.wait()


async def _wait_for_card(service: Service, run: str) -> ModelCard:
    """Waits without limit until the learner has written the model card."""
    redis = await connect(service.endpoints.redis_url)
    service.on_drain(redis.aclose)
    return await Blobs(redis, run).wait_for_model_card()


def build(args: Args) -> Service:
    """Builds the service without starting it."""
    config = args.section("inference", InferenceConfig)
    try:
        node = Node.from_env(config.num_nodes)
    except EngineRefusalError as error:
        raise ConfigError(str(error)) from error
    if node.rank:
        return _FollowerProcess(args, config, node).service
    return _Process(args).service


def main() -> int:
    """Runs until a signal stops the service; returns the exit code."""
    return run_service(build)


if __name__ == "__main__":
    sys.exit(main())
