"""Gateway process: waits for the model card, then serves HTTP and session requests over NATS."""

import asyncio
import os
import sys
from functools import partial
from typing import Any

import msgspec

from tailrace.channel import GenerateClient, make_client
from tailrace.chat import ChatArgs, Renderer, TemplateError, load_parsers
from tailrace.clock import SystemClock
from tailrace.config import ConfigError, secret_variable
from tailrace.log import get_logger
from tailrace.policy import ContinuingPolicy, Stages
from tailrace.policy.leases import LeaseClient, Reporter
from tailrace.runtime import Args, Service, run_service
from tailrace.runtime.guard import Guard
from tailrace.store import Blobs, OutsideEpisodes, SessionLogs, StoreConnection, connect
from tailrace_gateway import metrics
from tailrace_gateway.adapters.app import GatewayApp
from tailrace_gateway.adapters.episodes import EpisodeRoutes
from tailrace_gateway.adapters.lease_keeper import LeaseKeeper
from tailrace_gateway.adapters.model_calls import model_call_routes
from tailrace_gateway.adapters.server import HttpServer, bind, origin_of
from tailrace_gateway.adapters.sessions import SessionRoutes
from tailrace_gateway.config import GatewayConfig
from tailrace_gateway.core.calls import ModelCalls
from tailrace_gateway.core.gateway import Gateway, Renderers
from tailrace_gateway.core.sampling import PromiseRule
from tailrace_gateway.core.sessions import Identity, Sessions
from tailrace_gateway.core.trajectories import TrajectoryReader
from tailrace_gateway.handlers import SessionHandler
from tailrace_protos import subjects
from tailrace_protos.control import SchedulerBegan
from tailrace_protos.session import CloseSession, ExportSession, OpenSession, SessionClosed
from tailrace_protos.weights import ModelCard

log = get_logger(__name__)

ADMIN_KEY = "TAILRACE_GATEWAY_ADMIN_KEY"
SHARED_PORT = "TAILRACE_GATEWAY_PORT"
_BLOB_TTL_S = 3600.0
_REAP_INTERVAL_S = 5.0
_AS_TEXT: dict[str, Any] = {"tool_parser": "none", "reasoning_parser": "none"}


async def build(args: Args) -> Service:
    """Build the service with its parts; the start hook opens the connections."""
    config = args.section("gateway", GatewayConfig)
    load_parsers(args.run.chat)  # a wrong parser ends the process before the model card arrives
    admin_key = secret_variable(os.environ, ADMIN_KEY)
    if len(admin_key) < 16:
        raise ConfigError(
            f"{ADMIN_KEY} must have at least 16 characters: a local cluster generates one, a chart "
            "keeps one in a Secret; everyone who has it may open sessions"
        )
    service = Service(
        "gateway",
        args.run,
        args.endpoints,
        instance_id=args.instance_id,
        drain_s=config.drain_s + 5.0,
    )
    gateway = _Gateway(service, config, admin_key)
    service.on_start(gateway.start)
    service.on_drain(gateway.stop)
    return service


class _Gateway:
    """Connections, clients and routes of this process from start to drain."""

    def __init__(self, service: Service, config: GatewayConfig, admin_key: str) -> None:
        self._service = service
        self._config = config
        self._admin_key = admin_key
        self._run = service.run.exp_name
        self._leases = LeaseClient(service.bus, self._run, service.instance_id)
        self._redis: StoreConnection | None = None
        self._client: GenerateClient | None = None
        self._calls: ModelCalls | None = None
        self._server: HttpServer | None = None
        self._serving: asyncio.Task[object] | None = None
        self._base_url = ""

    async def start(self) -> None:
        """Connect, wait for the model card, listen."""
        service, config = self._service, self._config
        self._redis = redis = await connect(
            service.endpoints.redis_url, deadline_s=config.store_timeout_s
        )
        blobs = Blobs(redis, self._run)
        card = await blobs.wait_for_model_card()
        renderers = _renderers(card, service.run.chat)
        self._client = client = make_client(
            config.transport, config.channel, service.bus.connection.client
        )
        await client.start()
        stages = Stages()
        attempts = config.max_generation_attempts
        store = SessionLogs(redis, self._run)
        gateway = Gateway.over(
            ContinuingPolicy(self._leases, client, stages, max_attempts=attempts),
            store,
            self._identity(renderers.chat),
            renderers,
            SystemClock(),
            max_concurrent_calls=config.max_concurrent_calls,
            promises=PromiseRule(config.on_broken_promise, config.max_asks, config.guided_decoding),
        )
        self._calls = gateway.calls
        handler = SessionHandler(
            gateway, store, self._service_url, self._announce, partial(_put_blob, blobs)
        )
        reader = TrajectoryReader(renderers.chat, card)
        episodes = OutsideEpisodes(redis, self._run)
        self._listen(gateway, handler, renderers.chat, episodes, reader, card.context_tokens)
        self._declare(handler)
        service.loop(
            "report",
            Reporter(service.bus, self._run, service.instance_id, stages, self._leases).run,
        )
        service.loop("reap", partial(_reap, gateway.sessions))
        service.loop("leases", LeaseKeeper(gateway.sessions, episodes, SystemClock()).run)
        _export(gateway)

    def _identity(self, renderer: Renderer) -> Identity:
        config = self._config
        return Identity(
            self._run,
            self._admin_key,
            renderer.stop_token_ids,
            config.session_keep_s,
            config.session_idle_s,
        )

    def _declare(self, handler: SessionHandler) -> None:
        service, run = self._service, self._run
        service.endpoint(subjects.gateway_open(run), OpenSession, handler.open)
        service.endpoint(subjects.gateway_export(run), ExportSession, handler.export)
        service.endpoint(subjects.gateway_close(run), CloseSession, handler.close)
        service.subscribe(subjects.gateway_closed(run), SessionClosed, handler.on_closed)
        began = self._leases.on_scheduler_began
        service.subscribe(subjects.scheduler_began(run), SchedulerBegan, began)

    def _listen(
        self,
        gateway: Gateway,
        handler: SessionHandler,
        renderer: Renderer,
        episode_store: OutsideEpisodes,
        reader: TrajectoryReader,
        context_tokens: int,
    ) -> None:
        config, run = self._config, self._service.run
        port = config.port or int(os.environ.get(SHARED_PORT, "0"))
        listener = bind(config.host, port)
        origin = config.advertised_url.rstrip("/")
        self._base_url = f"{origin or origin_of(listener, config.host)}/v1"
        routes = [
            *model_call_routes(gateway.calls, renderer, run),
            *SessionRoutes(
                gateway,
                config.session_defaults,
                self._url,
                handler,
                run.export_style,
                context_tokens,
            ).routes(),
        ]
        episodes = EpisodeRoutes(gateway, episode_store, handler, reader, self._url)
        guard = Guard(self._service.stop)
        app = GatewayApp(
            gateway.sessions,
            guard,
            [*routes, *episodes.routes()],
            config.max_body_bytes,
            episodes.episode_of_key,
        )
        self._server = server = HttpServer(app, listener, config.keep_alive_s)
        self._serving = asyncio.create_task(guard.run("http", server.serve()), name="http")
        self._serving.add_done_callback(self._on_http_end)
        log.info("listener", base_url=self._base_url)

    def _on_http_end(self, _: asyncio.Task[object]) -> None:
        if not self._service.draining.is_set():
            self._service.stop("the HTTP server ended", 1)

    async def stop(self) -> None:
        """Let calls finish within `drain_s`, cancel the rest, and report to the scheduler that none is
        in flight."""
        if self._server is not None and self._serving is not None and self._calls is not None:
            self._calls.is_draining = True
            self._server.stop()
            await self._calls.drain(self._config.drain_s)
            await self._server.wait_stopped(self._serving, 2.0)
        await self._leases.report()
        if self._client is not None:
            await self._client.close()
        if self._redis is not None:
            await self._redis.aclose()

    def _url(self) -> str:
        return self._base_url

    def _service_url(self) -> str:
        origin = self._config.service_url.rstrip("/")
        return f"{origin}/v1" if origin else self._base_url

    async def _announce(self, message: SessionClosed) -> None:
        await self._service.bus.publish(subjects.gateway_closed(self._run), message)


def _renderers(card: ModelCard, chat: ChatArgs) -> Renderers:
    try:
        return Renderers(
            Renderer.from_model_card(card, chat),
            Renderer.from_model_card(card, msgspec.structs.replace(chat, **_AS_TEXT)),
            chat.reasoning,
        )
    except TemplateError as error:
        raise ConfigError(f"pretrain: {error}") from error


async def _put_blob(blobs: Blobs, data: bytes) -> str:
    return await blobs.put(data, _BLOB_TTL_S)


async def _reap(sessions: Sessions) -> None:
    while True:
        await asyncio.sleep(_REAP_INTERVAL_S)
        sessions.reap()


def _export(gateway: Gateway) -> None:
    """Bind the gauges to the live sets, so that each scrape reads current values."""
    metrics.CALLS.set_function(lambda: len(gateway.calls.running))
    metrics.SESSIONS.set_function(lambda: len(gateway.sessions))


def main() -> int:
    """Run the service and return the exit code of the process."""
    return run_service(build)


if __name__ == "__main__":
    sys.exit(main())
