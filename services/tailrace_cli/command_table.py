"""Commands by name. A command's module is imported when the command is asked for, not before.

`tailrace --help` and completion of names show the lines of this table; the first line of a command's
own help is the same.
"""

import importlib
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from tailrace.start import no_garbage_collection


class Listed(NamedTuple):
    """Place of a command, `module:name` below `tailrace_cli.commands`, and the line about it."""

    place: str
    summary: str


COMMANDS = {
    "init": Listed(
        "init:init",
        "Copy an example into a folder of your own, to change it; without a name, list the examples.",
    ),
    "train": Listed(
        "train:train",
        "Train on a local cluster of every service; ends with a summary and report.html.",
    ),
    "eval": Listed(
        "evaluate:evaluate", "Evaluate a checkpoint on the experiment's fixed evaluation set."
    ),
    "up": Listed("up:up", "Start the local cluster and keep it up until Ctrl-C."),
    "submit": Listed(
        "submit:submit",
        "Submit an experiment to a standing release on Kubernetes (docs/kubernetes.md).",
    ),
    "validate": Listed(
        "validate:validate",
        "Load what an experiment names, compare sizes, and print problems; starts no service.",
    ),
    "episode": Listed(
        "episode:episode", "Play one episode in this terminal, turn by turn, without any cluster."
    ),
    "import-config": Listed(
        "import_config:import_config",
        "Write another system's configuration in our keys; settings without a place go to stderr.",
    ),
    "export": Listed(
        "export:export",
        "Write a checkpoint as a plain Hugging Face model: weights, configuration, tokenizer.",
    ),
    "doctor": Listed(
        "doctor:doctor", "Say what this machine gives, what is missing, and what to do about it."
    ),
    "explain": Listed(
        "explain:explain",
        "Print a key's meaning, type, default and readers; of a section, all its keys.",
    ),
    "why": Listed(
        "why:why",
        "Print where a run's or an episode's time went, and the settings that move the largest parts.",
    ),
    "runs": Listed("runs:runs", "List the runs of a folder: state, steps, held-out success, time."),
    "status": Listed(
        "runs:status",
        "Print where a run stands: whether it goes on, its newest figures, its failures and hints.",
    ),
    "logs": Listed(
        "runs:logs", "Print the newest lines of a run's logs, merged by time, in a form for people."
    ),
    "stop": Listed(
        "runs:stop",
        "End a run as Ctrl-C does: agents hand back their episodes, checkpoints stay; "
        "wait for its end.",
    ),
    "report": Listed(
        "report:report",
        "Write report.html of a run as it stands; of several runs, comparison.html with all of them.",
    ),
    "tools": Listed("tools:app", "Serve tools, list those that are served, call one."),
    "simulate": Listed(
        "simulate:app",
        "Simulate training on clusters of these sizes and print the measures of each.",
    ),
}


class CommandTable(TyperGroup):
    """Group of all commands: lists them by their lines, and imports the one that is asked for."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {
            name: TyperCommand(name, help=listed.summary) for name, listed in COMMANDS.items()
        }

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Name, command with its options, and the words behind the name."""
        name, found, words = super().resolve_command(ctx, args)
        return name, load_command(name) if name else found, words


def load_command(name: str) -> Any:
    """Import a command, or a group of them, with its options."""
    module, _, attribute = COMMANDS[name].place.partition(":")
    with no_garbage_collection():
        found = getattr(importlib.import_module(f"tailrace_cli.commands.{module}"), attribute)
    one = typer.Typer()
    if isinstance(found, typer.Typer):
        one.add_typer(found, name=name)
    else:
        one.command(name)(found)
    return typer.main.get_group(one).commands[name]
