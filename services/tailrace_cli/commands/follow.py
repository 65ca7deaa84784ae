"""Follow a run on Kubernetes to its end: `python -m tailrace_cli.commands.follow --config FILE`.

With `--until episode` it ends as soon as one episode has settled as `ok` (`helm test`). With
`--then-stop` it sets the replicas of the named workloads to 0 once the run has ended. Exit codes: 0 the
run has finished, 1 it has failed, 2 a mistake in the configuration, 3 the API did not let it stop the
workloads: the Job starts it again.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from tailrace.bus import Bus
from tailrace.config import (
    ConfigError,
    Endpoints,
    RunConfig,
    load_experiment,
    run_config,
    section_config,
)
from tailrace.log import configure, get_logger
from tailrace_autoscaler.adapters.kubernetes_api import KubernetesWorkloads, in_cluster
from tailrace_autoscaler.ports import MissingWorkloadError, WorkloadsUnavailableError
from tailrace_cli.console import plain_console
from tailrace_cli.live_view import ENDS, ProgressView
from tailrace_protos import subjects
from tailrace_protos.control import RunStatus
from tailrace_protos.event import EpisodeSettled, EventBatch
from tailrace_scheduler.config import SchedulerConfig

log = get_logger(__name__)

_POLL_S = 2.0
_STOP_WITHIN_S = 600.0
_NOT_STOPPED = 3


class Follower:
    """Waits for the end of a run, or for an episode."""

    def __init__(
        self, console: Console, run: RunConfig, silence_s: float, *, until_episode: bool
    ) -> None:
        self._console = console
        self._run = run.exp_name
        self._silence_s = silence_s
        self._until_episode = until_episode
        self._view = ProgressView(console, self._run, is_live=False)
        self._heard = asyncio.Event()
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def follow(self, endpoints: Endpoints) -> int:
        """Return the exit code."""
        bus = await Bus.connect(endpoints, name="cli")
        try:
            await bus.subscribe(subjects.run_status(self._run), RunStatus, self.on_status)
            if self._until_episode:
                await bus.subscribe(subjects.events(self._run), EventBatch, self.on_events)
            while not self._ended.done():
                self._heard.clear()
                await self._wait()
            return self._ended.result()
        finally:
            await bus.close()

    async def _wait(self) -> None:
        heard = asyncio.create_task(self._heard.wait())
        ends: set[asyncio.Future[Any]] = {heard, self._ended}
        await asyncio.wait(ends, timeout=self._silence_s or None, return_when=asyncio.FIRST_COMPLETED)
        if not heard.done() and not self._ended.done():
            self._end(1, f"the run failed: the scheduler has said nothing for {self._silence_s:.0f} s")
        heard.cancel()

    async def on_status(self, status: RunStatus) -> None:
        """Show a status; the last one of a run ends it."""
        self._heard.set()
        self._view.update(status)
        if status.phase in ENDS:
            failed = status.failed
            self._end(int(failed is not None), f"the run failed: {failed.reason}" if failed else "")

    async def on_events(self, batch: EventBatch) -> None:
        """End at the first valid episode."""
        for event in batch.events:
            if isinstance(event.body, EpisodeSettled) and event.body.outcome == "ok":
                self._end(0, f"episode {event.body.episode_id}: ok")

    def _end(self, exit_code: int, message: str) -> None:
        if not self._ended.done():
            self._ended.set_result(exit_code)
            if message:
                self._console.print(message, soft_wrap=True)


async def stop_workloads(names: Sequence[str]) -> None:
    """Set the replicas of `kind/name`s to 0, in order; a `-` waits for the pods of those before.

    A ScaledObject is deleted: KEDA would set replicas again. Raises `WorkloadsUnavailableError` where
    the API refuses, or is away for too long.
    """
    workloads = KubernetesWorkloads(*in_cluster())
    stopped: list[tuple[str, str]] = []
    for each in names:
        if each == "-":
            await _wait_until_gone(workloads, stopped)
            continue
        kind, _, name = each.partition("/")
        if kind == "ScaledObject":
            while await _again(workloads.delete_scaled_object, name):  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)
            continue
        await _again(workloads.set_replicas, kind, name, 0)
        stopped.append((kind, name))


async def _wait_until_gone(workloads: KubernetesWorkloads, stopped: list[tuple[str, str]]) -> None:
    """Wait for the end of pods, but not for ever: the node of one may be lost."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + _STOP_WITHIN_S
    for kind, name in stopped:
        while num_pods := await _again(workloads.num_pods, kind, name):
            if loop.time() > deadline_s:
                log.warning("pods still end: the next stop all the same", name=name, pods=num_pods)
                return
            await asyncio.sleep(_POLL_S)


async def _again(call: Any, *arguments: Any) -> Any:
    """Repeat a call of the API while it is away, for `_STOP_WITHIN_S`; None for what is not there."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + _STOP_WITHIN_S
    while True:
        try:
            return await call(*arguments)
        except MissingWorkloadError:
            return None
        except WorkloadsUnavailableError as error:
            if loop.time() > deadline_s:
                raise
            log.warning("no answer of the API", error=str(error))
            await asyncio.sleep(_POLL_S)


async def _main(options: argparse.Namespace) -> int:
    experiment = load_experiment(options.config)
    run = run_config(experiment, options.config)
    scheduler = section_config(experiment, "scheduler", SchedulerConfig, options.config)
    silence_s = scheduler.stall_timeout_s and scheduler.stall_timeout_s + scheduler.group_timeout_s
    configure(service="cli", run=run.exp_name, instance_id=options.instance_id)
    console = plain_console()
    follower = Follower(console, run, silence_s, until_episode=options.until == "episode")
    exit_code = await follower.follow(Endpoints.from_env())
    if options.then_stop:
        console.print("the run has ended: stopping its workloads")
        await stop_workloads(options.then_stop)
    return exit_code


def main(argv: Sequence[str] | None = None) -> int:
    """Follow a run; returns the exit code."""
    parser = argparse.ArgumentParser(description="Follow a run to its end.")
    parser.add_argument("--config", required=True, metavar="FILE", help="resolved experiment file")
    parser.add_argument("--instance-id", default="", metavar="ID", help="name in the log")
    parser.add_argument("--until", choices=("end", "episode"), default="end")
    parser.add_argument("--then-stop", nargs="*", default=[], metavar="KIND/NAME")
    try:
        return asyncio.run(_main(parser.parse_args(argv)))
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except WorkloadsUnavailableError as error:
        sys.stderr.write(f"error: the workloads of the ended run are not stopped: {error}\n")
        return _NOT_STOPPED


if __name__ == "__main__":
    sys.exit(main())
