"""`tailrace validate`: what an experiment resolves to."""

from __future__ import annotations

from rich.console import Console
from rich.syntax import Syntax

from tailrace_cli.experiment import Experiment


def validate(experiment: Experiment, console: Console) -> None:
    """Print the resolved experiment; it was checked when it was loaded."""
    console.print(Syntax(experiment.to_yaml(), "yaml", background_color="default"))
    console.print(f"{experiment.source}: valid", highlight=False)
