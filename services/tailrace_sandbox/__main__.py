"""The sandbox process: confines, then serves its tools to every run."""

from __future__ import annotations

import sys

from tailrace.runtime import Args, Service, run_service
from tailrace.tools import ToolWorker
from tailrace_sandbox.adapters.place import prepare
from tailrace_sandbox.adapters.runner import Runner
from tailrace_sandbox.adapters.tools import offers
from tailrace_sandbox.config import SandboxConfig


async def build(args: Args) -> Service:
    """The service; a machine that confines less than configured is a `ConfigError` before it starts."""
    config = args.section("sandbox", SandboxConfig)
    runner = Runner(await prepare(config))
    await runner.warm_up()
    service = Service(
        "sandbox", args.run, args.endpoints, instance_id=args.instance_id, drain_s=config.drain_s
    )
    service.on_drain(runner.close)
    worker = ToolWorker(
        offers(runner, config),
        service.bus,
        max_concurrency=config.max_concurrency + config.max_sessions,
        run=args.run.exp_name,
        worker_id=args.instance_id,
    )
    worker.join(service)
    return service


def main() -> int:
    """Run the service; the process's exit code."""
    return run_service(build)


if __name__ == "__main__":
    sys.exit(main())
