"""`tailrace validate`: what an experiment resolves to."""

from rich.console import Console
from rich.syntax import Syntax

from tailrace_cli.experiment import Experiment


def validate(experiment: Experiment, console: Console) -> None:
    """Print the resolved experiment; it was checked when it was loaded."""
    console.print(Syntax(experiment.to_yaml(), "yaml", background_color="default"))
    if key := experiment.learner.waits_for_step:
        console.print(
            f"learner.{key} needs all groups of a step: no backward pass begins before the last one",
            highlight=False,
        )
    console.print(f"{experiment.source}: valid", highlight=False)
