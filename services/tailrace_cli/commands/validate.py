"""`tailrace validate`: all checks of an experiment without a run, and a short summary."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.syntax import Syntax

from tailrace.config import ConfigError, InvalidConfigError
from tailrace_cli.commands.options import ConfigName, ConfigPath, ExperimentArgument, Overrides
from tailrace_cli.config import MAX_COUNT
from tailrace_cli.console import stderr, stdout, tell
from tailrace_cli.experiment import Experiment, load_given
from tailrace_cli.loading.checks import Report, check, estimate
from tailrace_cli.loading.facts import MachineFacts
from tailrace_cli.loading.memory import memory_of, memory_table
from tailrace_cli.validation import check_experiment

_GIB = 1 << 30
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(GiB|GB|MiB)?", re.IGNORECASE)
_UNITS = {"gib": _GIB, "gb": 10**9, "mib": 1 << 20}


@dataclass(frozen=True)
class Target:
    """Machine that a run will be on. `elsewhere`: another one, of which nothing else is known."""

    elsewhere: bool = False
    gpus: int = 0
    gpu_memory: str = ""
    model_config: str = ""  # a config.json in place of the model's own

    @property
    def machine(self) -> MachineFacts | None:
        """The machine by its number of GPUs; None if it is not given. Host memory is unknown: 0."""
        if bool(self.gpus) != bool(self.gpu_memory):
            raise ConfigError("--gpus and --gpu-memory belong together: give both, or neither")
        if self.model_config and not self.gpus:
            raise ConfigError("--model-config is read with --fast, --gpus and --gpu-memory only")
        if not self.gpus:
            return None
        found = _SIZE.fullmatch(self.gpu_memory.strip())
        if found is None or not float(found[1]):
            raise ConfigError(
                f"--gpu-memory {self.gpu_memory!r} is no size of memory: give one like 80GiB"
            )
        size = int(float(found[1]) * _UNITS[(found[2] or "GiB").lower()])
        return MachineFacts(host_bytes=0, shm_bytes=0, gpu_bytes=(size,) * self.gpus)


def validate(
    experiment: ExperimentArgument = None,
    overrides: Overrides = None,
    fast: Annotated[bool, typer.Option("--fast", help="Check keys and values alone.")] = False,
    show: Annotated[
        bool, typer.Option("--print", help="Print the experiment with every default first.")
    ] = False,
    elsewhere: Annotated[
        bool,
        typer.Option("--elsewhere", help="The run will be on another machine: skip devices, memory."),
    ] = False,
    gpus: Annotated[
        int, typer.Option(help="The machine has this number of GPUs.", min=0, max=MAX_COUNT)
    ] = 0,
    gpu_memory: Annotated[str, typer.Option(help="Memory of each of them, like 80GiB.")] = "",
    model_config: Annotated[
        str, typer.Option(metavar="FILE", help="With --fast: a config.json in place of the model's.")
    ] = "",
    config_path: ConfigPath = None,
    config_name: ConfigName = None,
) -> None:
    """Load what an experiment names, compare sizes, and print problems; starts no service.

    Modules, environments, data (first rows), tokenizer, chat template, devices, lengths, memory.
    `--gpus 8 --gpu-memory 80GiB` asks for a machine that is not here; with `--fast` only the model's
    configuration is read.
    """
    loaded = load_given(experiment, overrides, config_path, config_name)
    target = Target(elsewhere, gpus, gpu_memory, model_config)
    report_validity(loaded, fast=fast, show=show, target=target)


def report_validity(experiment: Experiment, *, fast: bool, show: bool, target: Target) -> None:
    """Check the experiment and print a summary; `InvalidConfigError` with all problems.

    `fast` compares the sections alone, and for a machine with `target.gpus` the memory. `show` prints
    the experiment with every default; the summary then goes to stderr.
    """
    console = stderr if show else stdout
    machine = target.machine
    if fast and machine is None:
        check_experiment(experiment)
        if show:
            print_resolved(experiment)
        _print(console, f"{experiment.source}: valid (keys and values alone)")
        return
    with stderr.status("loading what the experiment names"):
        report = _checked(experiment, target, machine, fast=fast)
    experiment = report.experiment
    if show:
        print_resolved(experiment)
    print_notes(report)
    if report.problems:
        for line in _memory(report):
            _print(console, line)
        raise InvalidConfigError(experiment.source, report.problems)
    for line in _described(report, experiment):
        _print(console, line)
    things = "thing" if report.num_steps == 1 else "things"
    loaded = f"{report.num_steps} {things} loaded in {report.took_s:.1f} s"
    _print(console, f"{experiment.source}: valid ({loaded})")


def _checked(
    experiment: Experiment, target: Target, machine: MachineFacts | None, *, fast: bool
) -> Report:
    if fast and machine is not None:
        return estimate(experiment, machine, target.model_config)
    on_machine = machine is None and not target.elsewhere
    return check(experiment, with_architecture=True, on_machine=on_machine, machine=machine)


def print_resolved(experiment: Experiment) -> None:
    """Print the resolved experiment with every default; in colours at a terminal alone."""
    text = experiment.to_yaml()
    if stdout.is_terminal:
        stdout.print(Syntax(text, "yaml", background_color="default"))
    else:
        stdout.print(text, end="", soft_wrap=True)


def print_notes(report: Report) -> None:
    """Print what is likely to be unwanted, though the experiment can run."""
    for note in report.notes:
        tell(f"note: {note}")


def _print(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True)


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
    for key, value in report.defaults.items():
        yield f"default  {key}: {value}, for these devices"
    yield from _memory(report)


def _memory(report: Report) -> Iterator[str]:
    if report.model is not None and report.machine is not None:
        memories = memory_of(report.experiment, report.model, report.machine)
        yield from memory_table([memory for memory in memories if memory.needs])
