"""Run an experiment on the local cluster: shared by `train`, `eval` and `up`."""

import asyncio
import contextlib
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec

from tailrace.bus import Bus
from tailrace.config import ConfigError
from tailrace.store.connection import without_credentials
from tailrace_cli.checkpoints import (
    lacks_checkpoint,
    own_checkpoint,
    refuse_earlier,
    require_steps_left,
)
from tailrace_cli.cluster.attached import Attachment
from tailrace_cli.cluster.local import LocalCluster, RunGoesOnError, clear_run_dir
from tailrace_cli.cluster.watch import Watch
from tailrace_cli.commands.validate import print_notes
from tailrace_cli.console import stderr, stdout, tell
from tailrace_cli.damaged import DamagedRunError
from tailrace_cli.experiment import Experiment, with_epochs
from tailrace_cli.live_view import ProgressView
from tailrace_cli.loading.checks import require_loadable
from tailrace_cli.reporting.pages import RELOAD_S, RunReport
from tailrace_cli.run_folders import RunFolder
from tailrace_protos import subjects
from tailrace_protos.control import RunStatus


def prepare_run_dir(experiment: Experiment, *, overwrite: bool) -> tuple[Experiment, int]:
    """Check the experiment before its run; delete an old run's directory when told to.

    Returns it with the defaults for the GPUs of this machine, and their number.
    Refuses to mix a new run into an old one's directory.
    """
    if experiment.cluster.num_nodes > 1:
        raise ConfigError(
            f"{experiment.source}: cluster.num_nodes is {experiment.cluster.num_nodes}: this command "
            "starts a cluster on one machine; docs/gpu.md says how to start services on several"
        )
    if experiment.inference.num_nodes > 1:
        raise ConfigError(
            f"{experiment.source}: inference.num_nodes is {experiment.inference.num_nodes}: this "
            "command starts a cluster on one machine; docs/kubernetes.md says how to start servers on "
            "several"
        )
    run = experiment.run
    if holder := RunFolder(run.run_dir).holder:
        raise RunGoesOnError(run.run_dir, holder)
    refuse_earlier(run, overwrite=overwrite)
    if lacks_checkpoint(experiment):
        tell(f"{run.run_dir} holds no checkpoint yet: the run begins again at step 0")
        run = msgspec.structs.replace(run, resume_from_checkpoint=False)
        experiment = dataclasses.replace(experiment, run=run)
    require_steps_left(run, overwrite=overwrite)
    if not overwrite and (own := own_checkpoint(run)):
        tell(
            f"{run.run_dir} has begun already: the run goes on from {own}, not from "
            f"{run.resume_from_checkpoint}"
        )
    report = require_loadable(experiment)
    print_notes(report)
    if overwrite:
        clear_run_dir(run.run_dir)
    return report.experiment, len(report.machine.gpu_bytes) if report.machine else 0


def run_to_the_end(
    experiment: Experiment, attachment: Attachment | None, num_gpus: int
) -> RunStatus | None:
    """Start the cluster, show the run until it has finished; None when interrupted (Ctrl-C).

    `num_gpus`: see `prepare_run_dir`. Raises `RunEndedError` when the run has failed.
    """
    return asyncio.run(_run(experiment, attachment, num_gpus))


def keep_up(experiment: Experiment, attachment: Attachment | None, num_gpus: int) -> None:
    """Start the cluster and keep it up until Ctrl-C, whatever the run does."""
    asyncio.run(_keep_up(with_epochs(experiment), attachment, num_gpus))


async def _run(
    experiment: Experiment, attachment: Attachment | None, num_gpus: int
) -> RunStatus | None:
    interrupted = _interruption()
    name = experiment.run.exp_name
    async with LocalCluster(experiment, attachment, tell, num_gpus) as cluster:
        run_dir = experiment.run.run_dir
        stderr.print(
            f"run {name}: logs in {experiment.run.logs_dir}, report in {run_dir / 'report.html'}",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
        reporting = asyncio.create_task(_keep_report(RunFolder(run_dir)), name="report")
        try:
            with ProgressView(stderr, name) as view:
                watch = _watch(cluster, experiment, view.update)
                return await watch.follow(cluster.endpoints, name, interrupted)
        finally:
            reporting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reporting


async def _keep_report(run: RunFolder) -> None:
    """Write the run's report again and again, in at most 2% of the time."""
    report = RunReport(run)
    while True:
        began_s = time.monotonic()
        try:
            await asyncio.to_thread(report.write)
        except (OSError, DamagedRunError) as error:  # a full disk: the run waits for space, too
            tell(f"report.html is not written: {error}")
        await asyncio.sleep(max(RELOAD_S, 50 * (time.monotonic() - began_s)))


async def _keep_up(experiment: Experiment, attachment: Attachment | None, num_gpus: int) -> None:
    interrupted = _interruption()
    async with LocalCluster(experiment, attachment, tell, num_gpus) as cluster:
        stdout.print(f"NATS   {cluster.endpoints.shown_nats_url}")
        stdout.print(f"Redis  {without_credentials(cluster.endpoints.redis_url)}")
        stdout.print(f"keys   {cluster.state_dir / 'credentials.json'}", soft_wrap=True)
        for name, pid in cluster.supervisor.pids.items():
            log_path = cluster.supervisor.log_path(name)
            stdout.print(f"{name:<14} process {pid}  {log_path}", soft_wrap=True)
        stderr.print("up; Ctrl-C drains and stops everything")
        view, name = ProgressView(stderr, "", is_live=False), experiment.run.exp_name
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


def _interruption() -> asyncio.Event:
    """An event set by SIGINT, SIGTERM or the end of the terminal; a second signal ends the process at
    once.

    Under `nohup` the end of the terminal changes nothing.
    """
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    terminals = [stream.fileno() for stream in (sys.stdout, sys.stderr) if stream and stream.isatty()]

    def interrupt(number: signal.Signals) -> None:
        event.set()
        if number == signal.SIGHUP:  # writing to a terminal that is gone would be an error
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for terminal in terminals:
                os.dup2(nowhere, terminal)
        tell(
            "ending: episodes are handed back, steps since the last checkpoint are saved; the signal "
            "again ends at once"
        )
        loop.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            loop.add_signal_handler(number, interrupt, number)
    return event
