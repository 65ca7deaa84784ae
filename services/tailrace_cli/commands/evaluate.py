"""`tailrace eval`: a checkpoint on the experiment's evaluation set, as a run of its own."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import msgspec
import typer

from tailrace.config import ConfigError, EvaluationArgs
from tailrace_cli.checkpoints import newest_checkpoint
from tailrace_cli.cluster.attached import Attachment
from tailrace_cli.commands.baselines import measured_baselines
from tailrace_cli.commands.cluster_run import prepare_run_dir, run_to_the_end
from tailrace_cli.commands.options import (
    Attach,
    Checkpoint,
    ConfigName,
    ConfigPath,
    ExperimentArgument,
    Overrides,
)
from tailrace_cli.console import stdout
from tailrace_cli.exit_codes import INTERRUPTED, RunEndedError
from tailrace_cli.experiment import Experiment, load_given
from tailrace_cli.summary import GREEDY, Row, last, read_health, read_metrics, sampling_name
from tailrace_cli.validation import check_experiment

_MAX_NAME = 59  # characters of a run's name that leave room for `_eval`


def evaluate(
    experiment: ExperimentArgument = None,
    overrides: Overrides = None,
    checkpoint: Checkpoint = "",
    config_path: ConfigPath = None,
    config_name: ConfigName = None,
    attach: Attach = None,
) -> None:
    """Evaluate a checkpoint on the experiment's fixed evaluation set."""
    first = load_given(experiment, overrides, config_path, config_name)
    check_experiment(first)
    evaluation = evaluation_of(first, checkpoint)
    attachment = Attachment(*attach, overwrite=True) if attach else None
    raise typer.Exit(run_evaluation(evaluation, attachment))


def evaluation_of(experiment: Experiment, checkpoint: str) -> Experiment:
    """The experiment that only evaluates `checkpoint` (default: the newest), as a run of its own."""
    run = experiment.run
    path = Path(checkpoint) if checkpoint else newest_checkpoint(run.run_dir)
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path} is no checkpoint (no config.json in it): name one with --checkpoint")
    only_evaluate = msgspec.structs.replace(
        run,
        exp_name=f"{run.exp_name[:_MAX_NAME]}_eval",
        pretrain=str(path.absolute()),
        max_steps=0,
        resume_from_checkpoint=False,
    )
    learner = msgspec.structs.replace(experiment.learner, from_scratch=None, warm_start=None)
    return dataclasses.replace(experiment, run=only_evaluate, learner=learner)


def run_evaluation(experiment: Experiment, attachment: Attachment | None) -> int:
    """Evaluate the experiment's `pretrain` weights on its evaluation set; returns the exit code."""
    experiment, num_gpus = prepare_run_dir(experiment, overwrite=True)
    if run_to_the_end(experiment, attachment, num_gpus) is None:
        return INTERRUPTED
    report_rates(experiment)
    return 0


def report_rates(experiment: Experiment) -> None:
    """Print the success rates of an evaluation that has ended.

    Raises `RunEndedError` after them if a named evaluation has no valid episode.
    """
    rows = read_metrics(experiment.run.run_dir)
    for name, args in experiment.run.evaluations.items():
        stdout.print(f"success rate: {_shown(rows, name)} ({name}, {_how(experiment, args)})")
    if not experiment.run.evaluations:
        stdout.print(f"success rate: {_shown(rows)} ({_how(experiment)})")
    greedy = last(rows, "eval/greedy/success_rate")
    if greedy is not None:
        stdout.print(f"success rate: {greedy:.4f} ({GREEDY})")
    for name, found in measured_baselines(experiment).items():
        for player, rate in found.items():
            stdout.print(f"success rate: {rate:.4f} (simple player of {name}: {player})")
    named = experiment.run.evaluations
    if empty := [name for name in named if last(rows, f"eval/tag/{name}/success_rate") is None]:
        failures = read_health(experiment.run.run_dir).failures
        commonest = [f"; {count:,} episodes failed: {reason}" for reason, count in failures[:1]]
        raise RunEndedError(f"evaluations.{empty[0]}: no episode was valid{''.join(commonest)}")


def _shown(rows: Sequence[Row], name: str = "") -> str:
    success = last(rows, f"eval/tag/{name}/success_rate" if name else "eval/success_rate")
    return "-" if success is None else f"{success:.4f}"


def _how(experiment: Experiment, args: EvaluationArgs | None = None) -> str:
    """Name of the replies of an evaluation."""
    own = args.temperature if args else None
    return sampling_name(experiment.agents.eval_generating_args.temperature if own is None else own)
