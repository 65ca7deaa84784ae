"""`tailrace simulate calibrate`: costs of a run's engines, for the simulator."""

import json
from pathlib import Path
from typing import Annotated

import typer

from tailrace.config import ConfigError
from tailrace_cli.commands.runs import OutputDir
from tailrace_cli.console import plain_console
from tailrace_cli.event_log import log_of
from tailrace_cli.simulation.calibration import COSTS, fit, read_reports


def calibrate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's name or directory.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="File for --engine.")],
    output_dir: OutputDir = "runs",
) -> None:
    """Fit the costs of a run's engines to the reports that they made, for `simulate --engine`."""
    found = fit(read_reports(log_of(run, output_dir).parent / "engines.jsonl"))
    try:
        output.write_text(json.dumps(found.costs, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--output {output}: {error.strerror}; give a file that can be written"
        ) from None
    console = plain_console()
    for name, value in found.costs.items():
        console.print(f"{name:14} {value:.3g} s" if name in COSTS else f"{name:14} {value:,}")
    console.print(
        f"fitted to {found.num_intervals} intervals; half of them are within "
        f"{100 * found.median_error:.1f}% of the measured time"
    )
