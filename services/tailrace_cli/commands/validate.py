"""`tailrace validate`: all checks of an experiment without a run, and a short summary."""

from collections.abc import Iterator

from rich.console import Console
from rich.syntax import Syntax

from tailrace.config import InvalidConfigError
from tailrace_cli.experiment import Experiment
from tailrace_cli.loading.checks import Report, check
from tailrace_cli.loading.fitting import GIB, memory_of
from tailrace_cli.validation import check_experiment


def validate(experiment: Experiment, console: Console, *, fast: bool, on_machine: bool) -> None:
    """Check the experiment and print a summary; `InvalidConfigError` with all problems.

    `fast` compares the sections alone. `on_machine`: the devices and memory of this machine count.
    """
    if fast:
        check_experiment(experiment)
        _print(console, f"{experiment.source}: valid (keys and values alone)")
        return
    with console.status("loading what the experiment names"):
        report = check(experiment, with_architecture=True, on_machine=on_machine)
    print_notes(report, console)
    if report.problems:
        raise InvalidConfigError(experiment.source, report.problems)
    for line in _described(report, experiment):
        _print(console, line)
    loaded = f"{report.num_steps} things loaded in {report.took_s:.1f} s"
    _print(console, f"{experiment.source}: valid ({loaded})")


def print_resolved(experiment: Experiment, console: Console) -> None:
    """Print the resolved experiment with every default."""
    console.print(Syntax(experiment.to_yaml(), "yaml", background_color="default"))


def print_notes(report: Report, console: Console) -> None:
    """Print what is likely to be unwanted, though the experiment can run."""
    for note in report.notes:
        _print(console, f"note: {note}", style="yellow")


def _print(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def _described(report: Report, experiment: Experiment) -> Iterator[str]:
    """Short summary of a valid experiment, line by line."""
    run, learner, model = experiment.run, experiment.learner, report.model
    if model is not None:
        context = f", context {model.context_tokens:,} tokens" if model.context_tokens else ""
        yield f"model    {model.name}: {model.num_parameters:,} parameters{context}"
    lengths = {each.tag: each.num_tokens for each in report.prompts if each.num_tokens}
    for line in report.lines:
        tag = line.partition(":")[0]
        yield f"tasks    {line}{f', prompt of {lengths[tag]} tokens' if tag in lengths else ''}"
    yield (
        f"step     {run.groups_per_step} groups of {run.group_size} episodes; {learner.adv_estimator}, "
        f"loss {learner.loss}, at most {run.max_staleness} steps behind"
    )
    yield (
        f"lengths  {experiment.agents.max_episode_tokens} tokens an episode, of them "
        f"{experiment.agents.generating_args.max_new_tokens} sampled"
    )
    if key := learner.waits_for_step:
        yield f"waiting  learner.{key} needs all groups of a step before the first backward pass"
    if model is not None and report.machine is not None:
        for memory in memory_of(experiment, model, report.machine):
            used, there = memory.least + memory.activations, memory.capacity
            yield f"memory   about {used / GIB:.2g} of {there / GIB:.1f} GiB of {memory.place}"
