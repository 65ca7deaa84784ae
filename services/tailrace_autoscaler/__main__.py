"""Process of the autoscaler: wires the run's messages, the planner and Kubernetes together."""

import sys

import nats.errors
import nats.js.errors

from tailrace.clock import SystemClock
from tailrace.config import ConfigError
from tailrace.runtime import Args, Service, run_service
from tailrace_autoscaler.adapters.kubernetes_api import KubernetesWorkloads, in_cluster
from tailrace_autoscaler.config import AutoscalerConfig
from tailrace_autoscaler.core.signals import Signals
from tailrace_autoscaler.handlers import Autoscaler
from tailrace_protos import subjects
from tailrace_protos.control import RunStatus, ServerStatus


def build(args: Args) -> Service:
    """Build the service; `ConfigError` where `builtin` could not act."""
    config = args.section("autoscaler", AutoscalerConfig)
    workloads = None
    if config.mode == "builtin":
        unnamed = [name for name, each in config.targets.items() if not each.kind or not each.name]
        if unnamed:
            raise ConfigError(
                f"autoscaler.targets.{unnamed[0]} has no kind and name: the chart sets them"
            )
        workloads = KubernetesWorkloads(*in_cluster())
    service = Service("autoscaler", args.run, args.endpoints, instance_id=args.instance_id)
    run, clock = args.run.exp_name, SystemClock()
    signals = Signals(config.targets)

    async def on_status(status: RunStatus) -> None:
        signals.on_status(status, clock.monotonic_s())

    async def on_server(status: ServerStatus) -> None:
        signals.on_server(status, clock.monotonic_s())

    async def waiting() -> int | None:
        """Episodes in the work queue that no worker has taken; None while NATS does not say."""
        found = 0
        for phase in subjects.PHASES:
            try:
                info = await service.bus.jetstream.consumer_info(subjects.episodes_stream(run), phase)
            except (nats.errors.Error, nats.js.errors.Error):
                return None
            found += info.num_pending or 0
        return found

    async def watch() -> None:
        await service.bus.registry.watch(on_server)

    autoscaler = Autoscaler(config, signals, waiting, workloads, clock)
    service.subscribe(subjects.run_status(run), RunStatus, on_status)
    service.loop("watch", watch)
    service.loop("look", autoscaler.run)
    return service


def main() -> int:
    """Run the service; the process's exit code."""
    return run_service(build)


if __name__ == "__main__":
    sys.exit(main())
