"""Process of a service: command line, logging, event loop, exit code.

`python -m tailrace_<service> --config FILE [--instance-id ID]`. `--server-id` and `--worker-id` are
aliases of `--instance-id`, with the names of the registry and of the leases. Exit codes: 0 after a
drain, 2 for a wrong configuration (one line on stderr, no traceback), 70 after an event loop that was
blocked for too long, 1 otherwise.
"""

import argparse
import asyncio
import inspect
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import uvloop

from tailrace import log, tracing
from tailrace.config import (
    Config,
    ConfigError,
    Endpoints,
    RunConfig,
    load_experiment,
    run_config,
    section_config,
)
from tailrace.runtime.guard import EXIT_CONFIG
from tailrace.runtime.service import Service
from tailrace.runtime.watchdog import LoopWatchdog

C = TypeVar("C", bound=Config)


@dataclass(frozen=True)
class Args:
    """Arguments of a service process."""

    config: str  # path of the experiment file
    instance_id: str
    experiment: Mapping[str, Any]
    run: RunConfig
    endpoints: Endpoints

    @property
    def server_id(self) -> str:
        """Instance id, under the name that inference servers use."""
        return self.instance_id

    @property
    def worker_id(self) -> str:
        """Instance id, under the name that workers use."""
        return self.instance_id

    def section(self, name: str, kind: type[C]) -> C:
        """Reads this service's section of the experiment file."""
        return section_config(self.experiment, name, kind, self.config)


Build = Callable[[Args], Awaitable[Service] | Service]


def run_service(build: Build, argv: Sequence[str] | None = None) -> int:
    """Runs the service from `build` until it ends; returns the exit code of the process."""
    return run_with_args(lambda args: serve(build, args), argv)


def run_with_args(work: Callable[[Args], int], argv: Sequence[str] | None = None) -> int:
    """Runs `work` with the arguments of the command line; returns the exit code of the process."""
    options = _parse(argv)
    try:
        return work(_args(options))
    except ConfigError as error:
        _print_error(str(error))
        return EXIT_CONFIG


def serve(build: Build, args: Args) -> int:
    """Runs the service from `build` until it ends; returns its exit code."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(build, args))


def _print_error(message: str) -> None:
    """Prints the last line of stderr; the supervisor of this process shows it to the user."""
    sys.stderr.write(f"error: {' '.join(message.split())}\n")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A Tailrace service.")
    parser.add_argument("--config", required=True, metavar="FILE", help="resolved experiment file")
    parser.add_argument(
        "--instance-id",
        "--server-id",
        "--worker-id",
        dest="instance_id",
        default="",
        metavar="ID",
        help="name of this instance among its replicas (letters, digits, '_', '-')",
    )
    return parser.parse_args(argv)


def _args(options: argparse.Namespace) -> Args:
    experiment = load_experiment(options.config)
    run = run_config(experiment, options.config)
    instance_id = options.instance_id or f"p{os.getpid()}"
    if not instance_id.replace("_", "").replace("-", "").isalnum():
        raise ConfigError(f"--instance-id {instance_id!r}: use letters, digits, '_' or '-'")
    return Args(options.config, instance_id, experiment, run, Endpoints.from_env())


async def _serve(build: Build, args: Args) -> int:
    log.configure(run=args.run.exp_name, instance_id=args.instance_id)
    made = build(args)
    service = await made if inspect.isawaitable(made) else made
    log.bind(service=service.name)
    tracing.configure(args.run, service.name, args.instance_id)
    watchdog = LoopWatchdog(service.max_blocked_s)
    watchdog.start()
    try:
        exit_code = await service.serve()
    finally:
        watchdog.stop()  # a process may end slowly; with its loop gone it would look blocked
        await asyncio.to_thread(tracing.close)
    if exit_code == EXIT_CONFIG:
        _print_error(service.stop_reason)
    return exit_code
