"""The agents process: waits for the model card, then plays what comes on the work queue."""

import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from tailrace import tracing
from tailrace.channel import GenerateClient, make_client
from tailrace.chat import Renderer, TemplateError, load_parsers
from tailrace.clock import SystemClock
from tailrace.config import ConfigError, RunConfig
from tailrace.policy.activity import Stages
from tailrace.policy.continuation import ContinuingPolicy
from tailrace.policy.leases import LeaseClient, Reporter
from tailrace.runtime import Args, Service, run_service
from tailrace.store import (
    Blobs,
    Journal,
    OutsideEpisodes,
    StoreConnection,
    TrajectoryBuffer,
    connect,
)
from tailrace.tools import ToolClient
from tailrace_agents import metrics
from tailrace_agents.adapters.gateway_sessions import GatewaySessions
from tailrace_agents.adapters.kept_episodes import EpisodeKeeper
from tailrace_agents.adapters.mlflow_traces import EpisodeTraces
from tailrace_agents.adapters.outside_desk import StoredDesk
from tailrace_agents.adapters.player_factory import PlayerFactory, WorkflowStage
from tailrace_agents.adapters.scoring import RewardClient
from tailrace_agents.adapters.workflow_inline import InlineRunner
from tailrace_agents.adapters.workflow_pool import AnyRunner, start_runner
from tailrace_agents.config import AgentsConfig
from tailrace_agents.core.machine import EpisodePlayer
from tailrace_agents.core.token_policy import TokenModel
from tailrace_agents.handlers import EpisodeHandler, HandlerParts
from tailrace_protos import subjects
from tailrace_protos.control import EpisodesStopped, SchedulerBegan
from tailrace_protos.episode import EpisodeTask
from tailrace_protos.weights import ModelCard


async def build(args: Args) -> Service:
    """The service with everything it needs; what needs a server is opened by its start hook."""
    config = args.section("agents", AgentsConfig)
    load_parsers(args.run.chat)  # a wrong parser ends the process before the model card arrives
    threads = ThreadPoolExecutor(config.env_threads, "env")
    stages = Stages()
    factory = PlayerFactory(config, args.run, args.config, threads, stages)
    runner = await start_runner(config.workflow, args.config) if config.workflow else None
    service = Service(
        "agents", args.run, args.endpoints, instance_id=args.worker_id, drain_s=config.drain_s
    )
    if isinstance(runner, InlineRunner):
        service.max_blocked_s = 0.0  # it watches the loop with the user's limit
    worker = _Worker(service, config, factory, stages, runner)
    service.on_start(worker.start)
    service.on_drain(worker.stop)
    if args.run.tracing.mlflow:
        tracing.add_sink(EpisodeTraces(args.run).sink())
    return service


class _Worker:
    """Connections and clients of this process, from start to drain."""

    def __init__(
        self,
        service: Service,
        config: AgentsConfig,
        factory: PlayerFactory,
        stages: Stages,
        runner: AnyRunner | None,
    ) -> None:
        run = service.run.exp_name
        self._service = service
        self._config = config
        self._factory = factory
        self._stages = stages
        self._leases = LeaseClient(service.bus, run, service.instance_id)
        reporter = Reporter(
            service.bus,
            run,
            service.instance_id,
            stages,
            self._leases,
            context_limit=config.max_episode_tokens,
            max_episodes={phase: config.max_in_flight(phase) for phase in subjects.PHASES},
        )
        service.loop("report", reporter.run)
        self._redis: StoreConnection | None = None
        self._client: GenerateClient | None = None
        self._tools: ToolClient | None = None
        self._runner = runner
        self._sessions: GatewaySessions | None = None
        _export(stages)

    async def start(self) -> None:
        """Connect, wait for the model card, declare what is pulled."""
        service, config = self._service, self._config
        run = service.run.exp_name
        self._redis = redis = await connect(service.endpoints.redis_url)
        card = await Blobs(redis, run).wait_for_model_card()
        check_length(config, card)
        renderer = make_renderer(card, service.run)
        self._client = client = make_client(
            config.transport, config.channel, service.bus.connection.client
        )
        await client.start()
        policy = ContinuingPolicy(
            self._leases, client, self._stages, max_attempts=config.max_generation_attempts
        )
        handler = EpisodeHandler(
            HandlerParts(
                players=self._players(renderer, policy, redis),
                policy=policy,
                rewards=RewardClient(service.bus, run, config.reward_timeout_s),
                buffer=TrajectoryBuffer(redis, run),
                make_journal=partial(Journal, redis, run),
                clock=SystemClock(),
                stages=self._stages,
                keeper=EpisodeKeeper(service.run.run_dir, service.instance_id, config.keep_episodes),
                greedy_baseline=config.greedy_baseline,
            )
        )
        service.subscribe(subjects.episodes_stopped(run), EpisodesStopped, handler.on_stopped)
        began = self._leases.on_scheduler_began
        service.subscribe(subjects.scheduler_began(run), SchedulerBegan, began)
        for phase in subjects.PHASES:
            service.pull(
                subjects.episodes_stream(run),
                phase,
                EpisodeTask,
                handler.handle,
                max_in_flight=config.max_in_flight(phase),
                max_deliveries=config.max_deliveries,
            )

    def _players(
        self, renderer: Renderer, policy: ContinuingPolicy, redis: StoreConnection
    ) -> dict[str, EpisodePlayer]:
        service = self._service
        pins = self._config.tool_schemas
        self._tools = tools = ToolClient(service.bus, service.run.exp_name, redis=redis, pins=pins)
        workflow = None
        if self._runner is not None:
            blobs = Blobs(redis, service.run.exp_name)
            self._sessions = GatewaySessions(service.bus, service.run.exp_name, blobs)
            if isinstance(self._runner, StoredDesk):
                self._runner.connect(OutsideEpisodes(redis, service.run.exp_name))
            workflow = WorkflowStage(self._runner, self._sessions)
        try:
            model = TokenModel(renderer, policy)
            return self._factory.players(model, tools, service.draining.is_set, workflow)
        except TemplateError as error:
            raise ConfigError(f"agents.custom_envs: {error}") from error

    async def stop(self) -> None:
        """Tell the scheduler and the servers that nothing is in flight here any more."""
        await self._leases.report()
        if self._runner is not None:
            await self._runner.close()
        if self._sessions is not None:
            await self._sessions.drain()
        if self._tools is not None:
            await self._tools.close()
        if self._client is not None:
            await self._client.close()
        if self._redis is not None:
            await self._redis.aclose()


def check_length(config: AgentsConfig, card: ModelCard) -> None:
    """Raises `ConfigError` for episodes that are longer than what the model reads."""
    longest, context = config.max_episode_tokens, card.context_tokens
    if 0 < context < longest:
        raise ConfigError(
            f"agents.max_episode_tokens ({longest}) exceeds the model's context of {context} tokens: "
            f"set it to at most {context}, or use a model with a longer context"
        )


def make_renderer(card: ModelCard, run: RunConfig) -> Renderer:
    """The renderer of the run's model; its mistakes are the user's to mend."""
    try:
        return Renderer.from_model_card(card, run.chat)
    except TemplateError as error:
        raise ConfigError(f"pretrain: {error}") from error


def _export(stages: Stages) -> None:
    """Let a scrape read the stages as they are then."""
    for state in ("generating", "in_tools", "in_reward", "settling"):
        metrics.EPISODES.labels(state).set_function(partial(getattr, stages, f"num_{state}"))


def main() -> int:
    """Run the service; the process's exit code."""
    return run_service(build)


if __name__ == "__main__":
    sys.exit(main())
