"""Process of the scheduler: reads its configuration, wires its parts, runs."""

import hashlib
import sys

from tailrace.clock import SteadyClock
from tailrace.config import ConfigError
from tailrace.runtime import Args, Service, run_service
from tailrace.store import Outbox, connect
from tailrace_protos import subjects
from tailrace_protos.base import encode_json
from tailrace_protos.control import AgentActivity, LeaseReport, LeaseRequest
from tailrace_scheduler import metrics
from tailrace_scheduler.adapters.engine_log import EngineLog
from tailrace_scheduler.adapters.nats_queue import NatsQueue
from tailrace_scheduler.adapters.redis_groups import RedisGroups
from tailrace_scheduler.adapters.run_files import EventFile, MetricsFile
from tailrace_scheduler.config import SchedulerConfig, check_capacity
from tailrace_scheduler.core.scheduler import SchedulerCore
from tailrace_scheduler.handlers import SchedulerActor, SchedulerDependencies
from tailrace_scheduler.ports import DiskFullError


async def build(args: Args) -> Service:
    """The service, ready to serve; raises `ConfigError` for what can never work."""
    config = args.section("scheduler", SchedulerConfig)
    try:
        check_capacity(args.run, config)
    except ValueError as error:
        raise ConfigError(f"{args.config}: {error}") from error
    service = Service("scheduler", args.run, args.endpoints, instance_id=args.instance_id)
    run, clock = args.run.exp_name, SteadyClock()
    try:
        events, rows = EventFile(args.run.run_dir), MetricsFile(args.run.run_dir)
        reports = EngineLog(args.run.run_dir)
    except DiskFullError as error:
        raise ConfigError(str(error)) from error
    metrics.MAX_STALENESS.set(args.run.max_staleness)
    metrics.watch_disk(args.run.run_dir)
    connection = await connect(args.endpoints.redis_url)
    world = SchedulerDependencies(
        run=run,
        config_digest=hashlib.sha256(encode_json(args.experiment)).hexdigest(),
        bus=service.bus,
        store=RedisGroups(connection, run),
        source=Outbox(connection, run),
        queue=NatsQueue(service.bus, run),
        events=events,
        metrics=rows,
        reports=reports,
        clock=clock,
    )
    actor = SchedulerActor(
        SchedulerCore(args.run, config, clock.unix_s()),
        world,
        reconcile_interval_s=config.reconcile_interval_s,
        on_ready=lambda: service.set_ready(True),
    )

    async def start() -> None:
        await actor.start()
        clock.begin()

    async def close() -> None:
        events.close()
        rows.close()
        reports.close()
        await connection.aclose()

    service.set_ready(False)
    service.on_start(start)
    service.on_drain(close)
    declare(service, actor, run)
    return service


def declare(service: Service, actor: SchedulerActor, run: str) -> None:
    """Declares subscriptions, answers and loops of the service."""
    service.endpoint(subjects.lease(run), LeaseRequest, actor.on_lease)
    service.subscribe(subjects.lease_report(run), LeaseReport, actor.on_lease_report)
    service.subscribe(subjects.activity(run), AgentActivity, actor.on_activity)
    for name in (
        "relay",
        "acknowledge",
        "tick",
        "carry_out",
        "publish",
        "probe",
        "reconcile",
        "report",
    ):
        service.loop(name, getattr(actor, name))
    service.loop("watch_model", actor.watch_model)
    service.loop("watch_learner", actor.watch_learner)


def main() -> int:
    """Run the scheduler; the process's exit code."""
    return run_service(build)


if __name__ == "__main__":
    sys.exit(main())
