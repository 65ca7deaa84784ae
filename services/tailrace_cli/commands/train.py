"""`tailrace train` and `tailrace eval`: a run from start to report."""

import dataclasses
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
from rich.console import Console

from tailrace.config import ConfigError
from tailrace.data import load_dataset, source_baselines
from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace.import_path import importable_from
from tailrace_agents.config import AgentsConfig
from tailrace_cli.checkpoints import has_begun, newest_checkpoint
from tailrace_cli.cluster.attached import Attachment
from tailrace_cli.commands.cluster_run import prepare_run_dir, run_to_the_end
from tailrace_cli.experiment import Experiment, with_epochs
from tailrace_cli.reporting.pages import RunReport
from tailrace_cli.run_folders import RunFolder
from tailrace_cli.summary import (
    GREEDY,
    NO_BASELINES,
    Baselines,
    last,
    read_health,
    read_metrics,
    sampling_name,
    summary_rows,
    summary_table,
)
from tailrace_envs import env_baselines, make_env
from tailrace_envs.baselines import success_of, success_on_rows
from tailrace_protos.episode import EnvTask
from tailrace_scheduler.core.tasks import TaskSource

INTERRUPTED = 130


def train(
    experiment: Experiment, console: Console, *, overwrite: bool, attachment: Attachment | None
) -> int:
    """Train, then print the summary and write the report; returns the exit code.

    Raises `RunEndedError`, after the summary and the report, when the run has failed.
    """
    experiment = with_epochs(experiment)
    experiment, num_gpus = prepare_run_dir(experiment, console, overwrite=overwrite)
    try:
        status = run_to_the_end(experiment, console, attachment, num_gpus)
    finally:
        _conclude(experiment, console)
    if status is None:
        begun = has_begun(experiment.run.run_dir)
        remedy = "continue with resume_from_checkpoint=true" if begun else "nothing had begun yet"
        console.print(f"interrupted: {remedy}")
        return INTERRUPTED
    return 0


def _conclude(experiment: Experiment, console: Console) -> None:
    """Print the summary and write the report of what there is."""
    run = RunFolder(experiment.run.run_dir)
    rows, health = read_metrics(run.path), read_health(run.path)
    if rows or health.failures:
        is_evaluated = last(rows, "eval/success_rate") is not None
        baselines = _measured_baselines(experiment, console) if is_evaluated else NO_BASELINES
        lines = summary_rows(rows, health, baselines, run.eval_temperature)
        console.print(summary_table(f"run {run.path.name}", lines))
        try:
            console.print(f"report: {RunReport(run).write()}", soft_wrap=True)
        except OSError as error:
            _tell_unwritten("report.html", error, console)


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
    experiment, num_gpus = prepare_run_dir(experiment, console, overwrite=True)
    if run_to_the_end(experiment, console, attachment, num_gpus) is None:
        return INTERRUPTED
    rows = read_metrics(experiment.run.run_dir)
    how = sampling_name(experiment.agents.eval_generating_args.temperature)
    success = last(rows, "eval/success_rate")
    shown = "-" if success is None else f"{success:.4f}"
    console.print(f"success rate: {shown} ({how})")
    greedy = last(rows, "eval/greedy/success_rate")
    if greedy is not None:
        console.print(f"success rate: {greedy:.4f} ({GREEDY})")
    for tag, found in _measured_baselines(experiment, console).items():
        for name, rate in found.items():
            console.print(f"success rate: {rate:.4f} (simple player of {tag}: {name})")
    return 0


def _measured_baselines(experiment: Experiment, console: Console) -> Baselines:
    """Plays the baselines of the evaluation's tasks; keeps them as `baselines.json`."""
    try:
        found = measure_baselines(experiment)
    except ForeignCodeError as error:
        console.print(f"no baselines: {error}", style="yellow")
        return {}
    if found:
        path = experiment.run.run_dir / "baselines.json"
        part = path.with_name(f".{path.name}.part")
        try:
            part.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            part.replace(path)
        except OSError as error:
            _tell_unwritten(path.name, error, console)
    return found


def _tell_unwritten(name: str, error: OSError, console: Console) -> None:
    """The run's result does not depend on the file."""
    console.print(f"{name} is not written: {error}", style="yellow", soft_wrap=True)


def measure_baselines(experiment: Experiment) -> dict[str, dict[str, float]]:
    """Success of simple players on the tasks of the evaluation, by tag and player."""
    config = experiment.scheduler
    source = TaskSource(
        0,  # the evaluation set is that of every seed
        config.tags,
        config.num_groups_partition,
        config.eval_tags,
        config.eval_num_groups_partition,
    )
    tasks: dict[str, list[EnvTask]] = {}
    for task in map(source.eval_task, range(config.eval_groups)):
        tasks.setdefault(task.env_name, []).append(task)
    with importable_from(experiment.folder or Path.cwd()):
        found = {tag: _successes(experiment.agents, tag, of_tag) for tag, of_tag in tasks.items()}
    return {tag: of_tag for tag, of_tag in found.items() if of_tag}


def _successes(agents: AgentsConfig, tag: str, tasks: Sequence[EnvTask]) -> dict[str, float]:
    with foreign_code(f"a baseline of {tag}"):
        if entry := agents.custom_envs.get(tag):
            make = partial(make_env, entry.env_type, entry.env_config)
            return success_of(env_baselines(entry.env_type), make, [task.seed for task in tasks])
        if (source := agents.datasets.get(tag)) and (players := source_baselines(source)):
            rows = load_dataset(source, 0, f"agents.datasets.{tag}")
            return success_on_rows(players, [rows.eval_row(task.ordinal).data for task in tasks])
    return {}
