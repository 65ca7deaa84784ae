"""`tailrace train` and `tailrace eval`: a run from start to report."""

import dataclasses
import json
from pathlib import Path

import msgspec
from rich.console import Console

from tailrace.config import ConfigError
from tailrace_cli.checkpoints import newest_checkpoint
from tailrace_cli.cluster.attached import Attachment
from tailrace_cli.commands.cluster_run import prepare_run_dir, run_to_the_end
from tailrace_cli.experiment import Experiment
from tailrace_cli.report import write_report
from tailrace_cli.summary import last, read_health, read_metrics, summary_table

INTERRUPTED = 130


def train(
    experiment: Experiment, console: Console, *, overwrite: bool, attachment: Attachment | None
) -> int:
    """Train, then print the summary and write the report; returns the exit code.

    Raises `RunEndedError`, after the summary and the report, when the run has failed.
    """
    prepare_run_dir(experiment, overwrite=overwrite)
    try:
        status = run_to_the_end(experiment, console, attachment)
    finally:
        _conclude(experiment, console)
    if status is None:
        console.print("interrupted: continue with resume_from_checkpoint=true", highlight=False)
        return INTERRUPTED
    return 0


def _conclude(experiment: Experiment, console: Console) -> None:
    """Print the summary and write the report of what there is."""
    run = experiment.run
    rows, health = read_metrics(run.run_dir), read_health(run.run_dir)
    if rows or health.failures:
        renders = Path(run.render_save_dir) if run.render_save_dir else run.run_dir / "renders"
        console.print(summary_table(f"run {run.exp_name}", rows, health))
        report = write_report(run.run_dir, run.exp_name, renders)
        console.print(f"report: {report}", highlight=False, soft_wrap=True)


def write_summary(experiment: Experiment, path: str) -> None:
    """The run's directory and the last line of its metrics, for who started us."""
    run_dir = experiment.run.run_dir
    rows = read_metrics(run_dir)
    content = {"run_dir": str(run_dir), "metrics": rows[-1] if rows else {}}
    Path(path).write_text(json.dumps(content), encoding="utf-8")


def evaluation_of(experiment: Experiment, checkpoint: str) -> Experiment:
    """The experiment that only evaluates `checkpoint` (default: the newest), as a run of its own."""
    run = experiment.run
    path = Path(checkpoint) if checkpoint else newest_checkpoint(run.run_dir)
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path} is no checkpoint (no config.json in it): name one with --checkpoint")
    only_evaluate = msgspec.structs.replace(
        run,
        exp_name=f"{run.exp_name}_eval",
        pretrain=str(path.absolute()),
        max_steps=0,
        resume_from_checkpoint=False,
    )
    learner = msgspec.structs.replace(experiment.learner, from_scratch=None, warm_start=None)
    return dataclasses.replace(experiment, run=only_evaluate, learner=learner)


def evaluate(experiment: Experiment, console: Console, *, attachment: Attachment | None) -> int:
    """Evaluate the experiment's `pretrain` weights on its evaluation set; returns the exit code."""
    prepare_run_dir(experiment, overwrite=True)
    if run_to_the_end(experiment, console, attachment) is None:
        return INTERRUPTED
    success = last(read_metrics(experiment.run.run_dir), "eval/success_rate")
    shown = "-" if success is None else f"{success:.4f}"
    console.print(f"success rate: {shown}", highlight=False)
    return 0
