"""Run an experiment on the local cluster: shared by `train`, `eval` and `up`."""

import asyncio
import signal
from collections.abc import Callable
from typing import Any

from rich.console import Console

from tailrace.bus import Bus
from tailrace.config import ConfigError
from tailrace.store.connection import without_credentials
from tailrace_cli.cluster.attached import Attachment
from tailrace_cli.cluster.local import LocalCluster, clear_run_dir
from tailrace_cli.commands.validate import print_notes
from tailrace_cli.experiment import Experiment, with_epochs
from tailrace_cli.live_view import ProgressView, Watch
from tailrace_cli.loading.checks import require_loadable
from tailrace_protos import subjects
from tailrace_protos.control import RunStatus


def prepare_run_dir(experiment: Experiment, console: Console, *, overwrite: bool) -> None:
    """Check the experiment before its run; delete an old run's directory when told to.

    Refuses to mix a new run into an old one's directory.
    """
    run = experiment.run
    is_new = overwrite or run.resume_from_checkpoint is not False
    if not is_new and (run.run_dir / "events.jsonl").exists():
        raise ConfigError(
            f"{run.run_dir} holds an earlier run: continue it with resume_from_checkpoint=true, start "
            "again with --overwrite, or choose another exp_name"
        )
    print_notes(require_loadable(experiment), console)
    if overwrite:
        clear_run_dir(run.run_dir)


def run_to_the_end(
    experiment: Experiment, console: Console, attachment: Attachment | None
) -> RunStatus | None:
    """Start the cluster, show the run until it has finished; None when interrupted (Ctrl-C).

    Raises `RunEndedError` when the run has failed.
    """
    return asyncio.run(_run(experiment, console, attachment))


def keep_up(experiment: Experiment, console: Console, attachment: Attachment | None) -> None:
    """Start the cluster and keep it up until Ctrl-C, whatever the run does."""
    asyncio.run(_keep_up(with_epochs(experiment), console, attachment))


async def _run(
    experiment: Experiment, console: Console, attachment: Attachment | None
) -> RunStatus | None:
    interrupted = _interruption()
    name = experiment.run.exp_name
    async with LocalCluster(experiment, attachment, _teller(console)) as cluster:
        console.print(f"run {name}: logs in {experiment.run.logs_dir}", highlight=False)
        with ProgressView(console, name) as view:
            watch = _watch(cluster, experiment, view.update)
            return await watch.follow(cluster.endpoints, name, interrupted)


async def _keep_up(experiment: Experiment, console: Console, attachment: Attachment | None) -> None:
    interrupted = _interruption()
    async with LocalCluster(experiment, attachment, _teller(console)) as cluster:
        console.print(f"NATS   {cluster.endpoints.nats_url}", highlight=False)
        console.print(f"Redis  {without_credentials(cluster.endpoints.redis_url)}", highlight=False)
        console.print(f"keys   {cluster.state_dir / 'credentials.json'}", highlight=False)
        for name, pid in cluster.supervisor.pids.items():
            log_path = cluster.supervisor.log_path(name)
            console.print(f"{name:<14} process {pid}  {log_path}", highlight=False)
        console.print("up; Ctrl-C drains and stops everything", highlight=False)
        view, name = ProgressView(console, "", is_live=False), experiment.run.exp_name
        bus = await Bus.connect(cluster.endpoints, name="cli")

        async def on_status(status: RunStatus) -> None:
            view.tell_health(status)

        await bus.subscribe(subjects.run_status(name), RunStatus, on_status)
        waiting = asyncio.create_task(interrupted.wait())
        ends: set[asyncio.Future[Any]] = {waiting, cluster.supervisor.failed}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        await bus.close()
        if cluster.supervisor.failed.done():
            raise cluster.supervisor.failed.result()


def _watch(cluster: LocalCluster, experiment: Experiment, show: Callable[[RunStatus], None]) -> Watch:
    scheduler = experiment.scheduler
    silence_s = scheduler.stall_timeout_s and scheduler.stall_timeout_s + scheduler.group_timeout_s
    return Watch(cluster.supervisor, show, experiment.run.logs_dir, silence_s)


def _teller(console: Console) -> Callable[[str], None]:
    def tell(message: str) -> None:
        console.print(message, style="yellow", highlight=False, markup=False, soft_wrap=True)

    return tell


def _interruption() -> asyncio.Event:
    """An event set by SIGINT or SIGTERM; a second signal ends the process at once."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()

    def interrupt(number: signal.Signals) -> None:
        event.set()
        loop.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt, number)
    return event
