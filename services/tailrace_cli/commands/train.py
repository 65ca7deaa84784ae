"""`tailrace train`: a run from start to report, or a sweep of runs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from tailrace.config import ConfigError
from tailrace_cli.checkpoints import has_begun
from tailrace_cli.cluster.attached import Attachment
from tailrace_cli.commands.baselines import measured_baselines, tell_unwritten
from tailrace_cli.commands.cluster_run import prepare_run_dir, run_to_the_end
from tailrace_cli.commands.options import (
    Attach,
    ConfigName,
    ConfigPath,
    ExperimentArgument,
    Overrides,
    Overwrite,
)
from tailrace_cli.commands.sweep import MAX_RUNS, SweepRun, commands_of, slots_of, sweep, sweep_runs
from tailrace_cli.console import stdout, tell
from tailrace_cli.damaged import DamagedRunError
from tailrace_cli.exit_codes import INTERRUPTED
from tailrace_cli.experiment import Experiment, load, load_given, locate, with_epochs
from tailrace_cli.loading.checks import require_loadable
from tailrace_cli.reporting.pages import RunReport
from tailrace_cli.run_folders import RunFolder
from tailrace_cli.summary import (
    NO_BASELINES,
    last,
    read_health,
    read_metrics,
    summary_rows,
    summary_table,
)


def train(
    experiment: ExperimentArgument = None,
    overrides: Overrides = None,
    config_path: ConfigPath = None,
    config_name: ConfigName = None,
    overwrite: Overwrite = False,
    attach: Attach = None,
    workflow: Annotated[
        str, typer.Option(metavar="MODULE.CLASS", help="Your agent: plays the rows of the data sets.")
    ] = "",
    summary_file: Annotated[
        str, typer.Option(help="Write the run's directory and last metrics there, as JSON.")
    ] = "",
    jobs: Annotated[
        int,
        typer.Option(
            help="Runs of a sweep (seed=1,2,3) at once; 0: as many as fit here.", min=0, max=MAX_RUNS
        ),
    ] = 1,
) -> None:
    """Train on a local cluster of every service; ends with a summary and report.html.

    Several values of a key (`seed=1,2,3`) are a sweep: a run for each, and a comparison at the end.
    """
    settings = _with_workflow(overrides, workflow)
    if (config_path or config_name) and experiment is not None:
        settings, experiment = [experiment, *settings], None
    if swept := sweep_runs(settings):
        if attach or summary_file:
            raise ConfigError("--attach and --summary-file are for one run, not for a sweep")
        path = locate(experiment, config_path, config_name)
        raise typer.Exit(_run_sweep(path, swept, jobs, overwrite=overwrite))
    loaded = load_given(experiment, settings, config_path, config_name)
    check_summary_file(summary_file)
    attachment = Attachment(*attach, overwrite) if attach else None
    exit_code = run_training(loaded, overwrite=overwrite, attachment=attachment)
    if summary_file and exit_code == 0:
        write_summary(loaded, summary_file)
    raise typer.Exit(exit_code)


def _with_workflow(overrides: list[str] | None, workflow: str) -> list[str]:
    return [*(overrides or []), *([f"agents.workflow.agent={workflow}"] if workflow else [])]


def _run_sweep(path: Path, swept: Sequence[SweepRun], jobs: int, *, overwrite: bool) -> int:
    runs = commands_of(path, swept, ["--overwrite"] if overwrite else [])
    slots = slots_of(load(path, swept[0].overrides), jobs)
    return sweep(runs, slots, runs[0][0].path.parent)


def run_training(experiment: Experiment, *, overwrite: bool, attachment: Attachment | None) -> int:
    """Train, then print the summary and write the report; returns the exit code.

    Raises `RunEndedError`, after the summary and the report, when the run has failed.
    """
    experiment = _with_epochs(experiment)
    experiment, num_gpus = prepare_run_dir(experiment, overwrite=overwrite)
    try:
        status = run_to_the_end(experiment, attachment, num_gpus)
    finally:
        try:
            _conclude(experiment)
        except DamagedRunError as error:  # the run ends as it has ended
            tell(f"no summary: {error}")
    if status is None:
        begun = has_begun(experiment.run.run_dir)
        remedy = "continue with resume_from_checkpoint=true" if begun else "nothing had begun yet"
        tell(f"interrupted: {remedy}")
        return INTERRUPTED
    return 0


def _with_epochs(experiment: Experiment) -> Experiment:
    """See `with_epochs`; raises `InvalidConfigError` with all mistakes if rows cannot be counted."""
    try:
        return with_epochs(experiment)
    except ConfigError:
        require_loadable(experiment)
        raise


def _conclude(experiment: Experiment) -> None:
    """Print the summary and write the report of what there is."""
    run = RunFolder(experiment.run.run_dir)
    rows, health = read_metrics(run.path), read_health(run.path)
    if rows or health.failures:
        is_evaluated = last(rows, "eval/success_rate") is not None
        baselines = measured_baselines(experiment) if is_evaluated else NO_BASELINES
        lines = summary_rows(rows, health, baselines, run.eval_temperature)
        stdout.print(summary_table(f"run {run.path.name}", lines))
        try:
            stdout.print(f"report: {RunReport(run).write()}", soft_wrap=True)
        except OSError as error:
            tell_unwritten("report.html", error)


def check_summary_file(path: str) -> None:
    """Raises `ConfigError` if the file that `--summary-file` names cannot be made."""
    if path and not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"--summary-file {path}: name a file in a folder that exists")


def write_summary(experiment: Experiment, path: str) -> None:
    """The run's directory and the last line of its metrics, for who started us."""
    run_dir = experiment.run.run_dir
    rows = read_metrics(run_dir)
    content = {"run_dir": str(run_dir), "metrics": rows[-1] if rows else {}}
    Path(path).write_text(json.dumps(content), encoding="utf-8")
